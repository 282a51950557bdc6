"""Some cases of fuzz/rpc.py in every run of the tests, and the proof that it can find something.

Longer: `python fuzz/rpc.py --seconds 600`.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import pytest

from fuzzers import load


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("rpc", monkeypatch)


def test_nothing_is_found(fuzzer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = fuzzer.main(["--cases", "40"])
    report = capsys.readouterr().out
    print(report)  # with the seed, and the case if there is a finding: pytest shows it when this test fails
    assert status == 0
    for what in ("requests: ", "replies: ", "answered", "refused"):
        assert what in report, "the cases are all alike"


def test_a_client_that_raises_something_else_is_found(
    fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("rankmesh.rpc.client.read_item", broken)
    monkeypatch.setattr(fuzzer, "fuzz_requests", fuzzer.fuzz_replies)
    assert fuzzer.main(["--seconds", "20", "--seed", "1"]) == 1
    assert "FINDING in requests with seed 1" in capsys.readouterr().out


def test_a_seed_gives_the_same_bytes_again(fuzzer: ModuleType) -> None:
    def made(seed: int) -> list[bytes]:
        random = Random(seed)
        return [fuzzer.spoilt(random, make(random)) for make in (fuzzer.request, fuzzer.reply) for _ in range(50)]

    assert made(7) == made(7)
    assert made(7) != made(8)
