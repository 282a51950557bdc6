"""Who failed first, how, and the exit code."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

import pytest

from rankmesh.errors import ConnectError, JoinError, PeerLost
from rankmesh.launch.outcome import Consequence, Exit, Outcome, consequence


def traceback(error: Exception) -> list[str]:
    name = type(error).__name__ if type(error).__module__ == "builtins" else f"rankmesh.errors.{type(error).__name__}"
    return ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', f"{name}: {error}"]


def losing(rank: int, reason: str = "its connection was closed") -> PeerLost:
    return PeerLost(f"rank {rank} (host vm, pid {100 + rank}) is lost: {reason}, during recv from it.")


def failed(last_lines: Mapping[int, Sequence[str]], *exits: Exit) -> Outcome:
    outcome = ended(*exits)
    outcome.last_lines = last_lines
    return outcome


def ended(*exits: Exit) -> Outcome:
    outcome = Outcome()
    for one in exits:
        outcome.add([one])
    return outcome


def test_all_well() -> None:
    outcome = ended(Exit(0, 100, 0), Exit(1, 101, 0))
    assert (outcome.code, outcome.first, outcome.report()) == (0, None, [])


@pytest.mark.parametrize("returncode, code", [(1, 1), (7, 7), (255, 255), (-9, 137), (-11, 139), (-15, 143)])
def test_the_exit_code_is_the_first_failures(returncode: int, code: int) -> None:
    outcome = ended(Exit(2, 102, 0), Exit(1, 101, returncode), Exit(0, 100, 0), Exit(3, 103, -15, told=True))
    assert outcome.first == Exit(1, 101, returncode)
    assert outcome.code == code


CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
LOST_1 = Consequence("PeerLost", 1)


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], None),
        (["just words"], None),
        (traceback(ValueError("x")), None),
        (traceback(losing(1)), LOST_1),
        (traceback(losing(2, "it raised PeerLost: " + losing(1).message)), LOST_1),
        (traceback(losing(1))[-1:], LOST_1),
        (["PeerLost: rank 1 (host vm, pid 5) is lost: it has been silent for 5.0 s."], LOST_1),
        ([*traceback(losing(1)), "a line of an exit handler"], LOST_1),
        ([f"    | {traceback(losing(1))[-1]}", "    +------------------------------------"], LOST_1),
        ([*traceback(losing(1)), "", CAUSE, "", *traceback(RuntimeError("step"))], LOST_1),
        ([*traceback(losing(1)), "", CONTEXT, "", *traceback(RuntimeError("step"))], LOST_1),
        ([*traceback(losing(1)), *traceback(ValueError("later, of its own"))], None),
        ([losing(1).message, *traceback(ValueError("of its own"))], None),
        (["epoch 3", losing(1).message], LOST_1),
        ([losing(1).message, "epoch 3"], None),
        (traceback(losing(1, "it closed its endpoint")), Consequence("PeerLost", None)),
        (traceback(ConnectError("No connection to tcp://10.0.0.1:7000.")), Consequence("ConnectError", None)),
        (traceback(JoinError("Rank 1 is missing.")), Consequence("JoinError", None)),
        (traceback(ValueError("rankmesh.errors.PeerLost: rank 1")), None),
    ],
)
def test_what_the_last_lines_tell(lines: list[str], expected: Consequence | None) -> None:
    assert consequence(lines) == expected


@pytest.mark.parametrize(
    "first, exits, last_lines",
    [
        # Named by the others, though it ended last.
        (1, [(0, 1), (2, 1), (1, 1)], {0: losing(1), 2: losing(1), 1: ValueError()}),
        # Named, against a rank that native code aborted because of the loss.
        (1, [(0, 1), (2, -6), (1, 1)], {0: losing(1), 1: ValueError()}),
        # Most name rank 2, but that one names rank 1.
        (1, [(0, 1), (3, 1), (2, 1), (1, 1)], {0: losing(2), 3: losing(2), 2: losing(1), 1: ValueError()}),
        # The majority.
        (1, [(3, 1), (0, 1), (2, 1), (1, 1)], {0: losing(1), 2: losing(1), 4: losing(3)}),
        # As many name one as the other: the signal.
        (3, [(0, 1), (2, 1), (1, 1), (3, -9)], {0: losing(1), 2: losing(3)}),
        # Two that name each other name nobody.
        (2, [(0, 1), (1, 1), (2, 1)], {0: losing(1), 1: losing(0)}),
        # Named but well, or not on this node.
        (2, [(0, 1), (1, 0), (2, 1)], {0: losing(1)}),
        (0, [(0, 1), (1, 1)], {0: losing(7), 1: losing(7)}),
        # Nobody is named.
        (3, [(0, 1), (3, -9), (1, 1)], {}),
        (1, [(0, 1), (1, 1)], {0: JoinError("Rank 1 is missing."), 1: ValueError()}),
        (2, [(2, 1), (0, 1), (1, 1)], {}),
    ],
)
def test_whom_to_blame(first: int, exits: list[tuple[int, int]], last_lines: dict[int, Exception]) -> None:
    ordered = [Exit(rank, 100 + rank, code) for rank, code in exits]
    outcome = failed({rank: traceback(error) for rank, error in last_lines.items()}, *ordered)
    assert outcome.first is not None
    assert outcome.first.rank == first


def test_of_failures_noticed_together_the_lowest_rank_came_first() -> None:
    outcome = Outcome()
    outcome.add([Exit(2, 102, 1), Exit(1, 101, 1), Exit(3, 103, 1)])
    assert outcome.first == Exit(1, 101, 1)


@pytest.mark.parametrize("returncode, code", [(3, 3), (-15, 1), (-9, 1)])
def test_a_rank_that_the_launcher_had_to_end_is_blamed_if_the_others_lost_it(returncode: int, code: int) -> None:
    culprit = Exit(1, 101, returncode, told=True)
    outcome = failed({0: traceback(losing(1))}, Exit(0, 100, 1), culprit, Exit(2, 102, -15, told=True))
    assert (outcome.first, outcome.code) == (culprit, code)
    report = outcome.report()
    assert report[0].startswith("rankmesh: rank 1 (pid 101) failed first: it ")
    assert ("still there when the launcher ended it" in report[0]) == (returncode < 0)
    assert report[1:3] == [
        "rankmesh: rank 0 failed after it (PeerLost: rank 1 is lost).",
        "rankmesh: the launcher ended rank 2.",
    ]


@pytest.mark.parametrize(
    "returncode, text",
    [
        (3, "exited with code 3"),
        (-signal.SIGKILL, "SIGKILL: killed, perhaps because the machine ran out of memory"),
        (-signal.SIGSEGV, "SIGSEGV: invalid memory access"),
        (-signal.SIGTERM, "was ended by SIGTERM"),
        (-40, "was ended by signal 40"),
    ],
)
def test_how_a_rank_ended(returncode: int, text: str) -> None:
    assert text in Exit(0, 1, returncode).describe()


def test_the_report_names_the_culprit_its_followers_and_its_last_lines() -> None:
    lost = traceback(losing(2))
    outcome = failed(
        {2: ["Traceback", "ValueError: x"], 0: lost, 4: lost},
        *(Exit(4, 104, 1), Exit(0, 100, 1), Exit(5, 105, 7), Exit(2, 102, 5)),
        *(Exit(1, 101, -15, told=True), Exit(3, 103, 0, told=True)),
    )
    assert outcome.code == 5
    assert outcome.report() == [
        "rankmesh: rank 2 (pid 102) failed first: it exited with code 5.",
        "rankmesh: ranks 0, 4 failed after it (PeerLost: rank 2 is lost).",
        "rankmesh: rank 5 failed after it (it exited with code 7).",
        "rankmesh: the launcher ended ranks 1, 3.",
        "rankmesh: last lines of rank 2's standard error:",
        "  Traceback",
        "  ValueError: x",
    ]


def test_a_culprit_that_said_nothing() -> None:
    assert ended(Exit(0, 100, 5)).report()[-1] == "rankmesh: rank 0 wrote nothing to standard error."


def test_an_interruption_gives_its_signal_unless_all_ranks_end_well() -> None:
    outcome = Outcome(interrupted=signal.SIGTERM)
    outcome.add([Exit(0, 100, 0, told=True)])
    assert outcome.code == 0
    outcome.add([Exit(1, 101, -15, told=True)])
    assert (outcome.code, outcome.first) == (143, None)
    assert "SIGTERM" in outcome.report()[0]


def test_a_failure_before_the_interruption_keeps_its_code() -> None:
    outcome = ended(Exit(0, 100, 5))
    outcome.interrupted = signal.SIGINT
    assert outcome.code == 5


def test_time_limit_and_lost_output() -> None:
    assert Outcome(timed_out=True, exits=[Exit(0, 1, -15, told=True)]).code == 124
    assert "30 s" in Outcome(timed_out=True).report(timeout=30)[0]
    assert Outcome(lost_output="Broken pipe").code == 141
    assert "Broken pipe" in Outcome(lost_output="Broken pipe").report()[0]
