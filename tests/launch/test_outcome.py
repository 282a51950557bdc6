"""Who failed first, how, and the exit code."""

from __future__ import annotations

import signal

import pytest

from rankmesh.launch.outcome import Exit, Outcome


def ended(*exits: Exit) -> Outcome:
    outcome = Outcome()
    for one in exits:
        outcome.add([one])
    return outcome


def test_all_well() -> None:
    outcome = ended(Exit(0, 100, 0), Exit(1, 101, 0))
    assert (outcome.code, outcome.first, outcome.report([])) == (0, None, [])


@pytest.mark.parametrize("returncode, code", [(1, 1), (7, 7), (255, 255), (-9, 137), (-11, 139), (-15, 143)])
def test_the_exit_code_is_the_first_failures(returncode: int, code: int) -> None:
    outcome = ended(Exit(2, 102, 0), Exit(1, 101, returncode), Exit(0, 100, 99), Exit(3, 103, -15, told=True))
    assert outcome.first == Exit(1, 101, returncode)
    assert outcome.code == code


def test_of_failures_noticed_together_the_one_by_a_signal_came_first() -> None:
    outcome = Outcome()
    outcome.add([Exit(0, 100, 1), Exit(3, 103, -9), Exit(1, 101, 1)])
    assert outcome.first == Exit(3, 103, -9)


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
    outcome = ended(Exit(2, 102, 5), Exit(0, 100, 1), Exit(1, 101, -15, told=True), Exit(3, 103, 0, told=True))
    report = outcome.report(["Traceback", "ValueError: x"])
    assert report[0] == "rankmesh: rank 2 (pid 102) failed first: it exited with code 5."
    assert report[1] == "rankmesh: then rank 0 exited with code 1."
    assert report[2] == "rankmesh: the launcher ended ranks 1, 3."
    assert report[-2:] == ["  Traceback", "  ValueError: x"]


def test_a_culprit_that_said_nothing() -> None:
    assert ended(Exit(0, 100, 5)).report([])[-1] == "rankmesh: rank 0 wrote nothing to standard error."


def test_an_interruption_gives_its_signal_unless_all_ranks_end_well() -> None:
    outcome = Outcome(interrupted=signal.SIGTERM)
    outcome.add([Exit(0, 100, 0, told=True)])
    assert outcome.code == 0
    outcome.add([Exit(1, 101, -15, told=True)])
    assert (outcome.code, outcome.first) == (143, None)
    assert "SIGTERM" in outcome.report([])[0]


def test_a_failure_before_the_interruption_keeps_its_code() -> None:
    outcome = ended(Exit(0, 100, 5))
    outcome.interrupted = signal.SIGINT
    assert outcome.code == 5


def test_time_limit_and_lost_output() -> None:
    assert Outcome(timed_out=True, exits=[Exit(0, 1, -15, told=True)]).code == 124
    assert "30 s" in Outcome(timed_out=True).report([], timeout=30)[0]
    assert Outcome(lost_output="Broken pipe").code == 141
    assert "Broken pipe" in Outcome(lost_output="Broken pipe").report([])[0]
