"""Some cases of fuzz/sockets.py in every run of the tests, and the proof that it can find something.

Longer: `python fuzz/sockets.py --seconds 600`.
"""

from __future__ import annotations

from random import Random
from types import ModuleType

import pytest

from fuzzers import load


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("sockets", monkeypatch)


def test_nothing_is_found(fuzzer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = fuzzer.main(["--cases", "80"])
    report = capsys.readouterr().out
    print(report)  # with the seed, and the case if there is a finding: pytest shows it when this test fails
    assert status == 0
    assert report.startswith("seed ")
    for how in ("refused", "mutated"):
        assert how in report, "the cases are all alike"


def test_an_endpoint_that_dies_is_found(
    fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fuzzer.Case.run

    def deadly(case: object) -> str:
        made[-1]._process.kill()
        return str(run(case))

    made = []
    target = fuzzer.Target

    def remember() -> object:
        made.append(target())
        return made[-1]

    monkeypatch.setattr(fuzzer, "Target", remember)
    monkeypatch.setattr(fuzzer.Case, "run", deadly)
    assert fuzzer.main(["--seconds", "20", "--seed", "1"]) == 1
    assert "FINDING with seed 1" in capsys.readouterr().out


def test_a_seed_gives_the_same_case_again(fuzzer: ModuleType) -> None:
    class Deaf:
        """Takes what is sent, and ends."""

        def __init__(self) -> None:
            self.sent = b""

        def sendall(self, data: bytes) -> None:
            self.sent += data

        def recv(self, _: int) -> bytes:
            return b""

        def settimeout(self, _: float) -> None:
            """There is nothing to wait for."""

    def hello(seed: int, number: int) -> bytes:
        case = fuzzer.Case.__new__(fuzzer.Case)
        case._random, case._sock = Random(f"{seed}/{number}"), Deaf()
        case._handshake()
        return bytes(case._sock.sent)

    assert [hello(7, n) for n in range(20)] == [hello(7, n) for n in range(20)]
    assert hello(7, 0) != hello(8, 0)
