"""A second of fuzz/wire.py in every run of the tests, and the proof that it can find something.

Longer: `python fuzz/wire.py --seconds 600`.
"""

from __future__ import annotations

from random import Random
from types import ModuleType

import pytest

from fuzzers import load
from rankmesh.errors import ProtocolError
from timing import scaled


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("wire", monkeypatch)


def test_nothing_is_found(fuzzer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = fuzzer.main(["--seconds", "1"])
    report = capsys.readouterr().out
    print(report)  # with the seed, and the input if there is a finding: pytest shows it when this test fails
    assert status == 0
    assert report.startswith("seed ")
    for target in fuzzer.TARGETS:
        assert target.executions > 0
        assert len(target.seen) > 1, f"whatever {target.name} is given, it does the same"


def crash(data: bytes, _: Random) -> object:
    return {0: "fine"}[data.count(b"\xff\xff")]


def swallow_memory(data: bytes, _: Random) -> object:
    return len(bytearray(int.from_bytes(data[:4], "big") % (1 << 26)))


def refuse_wrongly(data: bytes, _: Random) -> object:
    if len(data) > 60:
        raise ValueError("not the error that callers are told to expect")
    raise ProtocolError("as it should be")


@pytest.mark.parametrize(
    "run, cause", [(crash, "KeyError"), (swallow_memory, "allocated"), (refuse_wrongly, "ValueError: not the error")]
)
def test_a_defect_is_found_and_can_be_replayed(
    fuzzer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: object,
    cause: str,
) -> None:
    broken = fuzzer.Target("broken", lambda random: random.randbytes(50), run, (ProtocolError,))
    monkeypatch.setattr(fuzzer, "TARGETS", (broken,))
    assert fuzzer.main(["--seconds", str(scaled(20)), "--seed", "1"]) == 1
    seed_line, finding_line, *_, hex_input = capsys.readouterr().out.splitlines()
    assert (seed_line, finding_line) == ("seed 1", "FINDING with seed 1")
    assert fuzzer.main(["--target", "broken", "--replay", hex_input]) == 1
    assert cause in capsys.readouterr().out
    assert fuzzer.main(["--target", "broken", "--replay", "00"]) == 0


def test_a_seed_gives_the_same_inputs_again(fuzzer: ModuleType) -> None:
    def inputs(seed: int) -> list[bytes]:
        random, drawn = Random(seed), []
        for original in fuzzer.TARGETS:
            target = fuzzer.Target(original.name, original.make, original.run, original.allowed, original.mutate)
            for _ in range(50):
                drawn.append(target.draw(random))
                target.execute(drawn[-1])
        return drawn

    assert inputs(7) == inputs(7)
    assert inputs(7) != inputs(8)
