"""What a rank remembers of its calls, and has to say of them: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.collectives.asking import ABSENT, GAVE_UP, OTHER, PAST, SAME, Answer, Ask, answer
from rankmesh.collectives.calls import DIGESTS, REMEMBERED, CallLog, Signature, digest

BARRIER, SUM = Signature("barrier"), Signature("all_reduce", "4 float64", "sum")


def log_of(count: int, odd: int = -1) -> CallLog:
    """Of so many barriers; `odd`: that one is another call."""
    log = CallLog()
    for sequence in range(count):
        signature = SUM if sequence == odd else BARRIER
        log.note(signature, digest(signature), 1)
    return log


def asked(log: CallLog, sequence: int, signature: Signature = BARRIER, closed: bool = False) -> Answer:
    return answer(log, Ask(1, sequence, digest(signature)), lambda _: "it waits", closed)


def test_calls_that_a_checksum_confuses_have_different_digests() -> None:
    """Of 1.5 million counts a CRC of 22 bits gave 323,424 digests, and 20,598 elements that of 100,020."""
    assert digest(Signature("all_reduce", "100020 float32", "sum", None, "shared")) != digest(
        Signature("all_reduce", "20598 float32", "sum", None, "shared")
    )
    counts = range(1, 50_000)
    assert len({digest(Signature("all_reduce", f"{count} float32")) for count in counts}) == len(counts)


def test_a_root_that_is_another_integer_is_the_same_root() -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    assert digest(Signature("gather", root=Two())) == digest(Signature("gather", root=2))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        digest(Signature("gather", root=0.5))  # type: ignore[arg-type]


@given(count=st.integers(0, 4 * REMEMBERED), back=st.integers(1, 4 * REMEMBERED))
def test_digests_are_known_for_longer_than_calls(count: int, back: int) -> None:
    sequence = count - back
    log = log_of(count, odd=sequence)
    if sequence >= 0:
        assert log.digest(sequence) == digest(SUM)
        assert sequence + 1 >= count or log.digest(sequence + 1) == digest(BARRIER)
        if back > REMEMBERED:
            with pytest.raises(KeyError):
                log[sequence]


def test_digests_are_bounded() -> None:
    log = log_of(DIGESTS + 3 * REMEMBERED + 5)
    assert log.digest(2 * REMEMBERED - 1) is None
    assert log.digest(log.count - 1) == log.digest(log.count - DIGESTS) == digest(BARRIER)


@pytest.mark.parametrize(
    "said, state, text",
    [
        (asked(log_of(3), 2), SAME, "barrier #2"),
        (asked(log_of(3), 2, SUM), OTHER, "barrier #2"),
        (asked(log_of(3), 3), ABSENT, "has not called it: last in barrier #2"),
        (asked(CallLog(), 0), ABSENT, "has not called it: no collective yet; it waits"),
        (asked(log_of(3), 3, closed=True), GAVE_UP, "it has closed this group, after 3 collectives"),
        (asked(log_of(3), 2, closed=True), SAME, "barrier #2"),
        (asked(log_of(1500), 1), SAME, "the same as #1: it is at barrier #1499"),
        (asked(log_of(1500), 1, SUM), OTHER, "something else as #1: it is at barrier #1499"),
        (asked(log_of(DIGESTS + 3000), 1), PAST, "has long been through #1: it is at barrier"),
    ],
)
def test_what_is_answered(said: Answer, state: str, text: str) -> None:
    assert said.state == state
    assert said.text.startswith(text)


def test_a_call_that_was_given_up_is_answered_so() -> None:
    log = log_of(2)
    log[1].given_up = "its user left"
    assert asked(log, 1) == Answer(GAVE_UP, "its user left")
    assert asked(log, 1, SUM).state == OTHER, "what was called comes first"


@pytest.mark.parametrize(
    "said, late, called",
    [
        (Answer(SAME, "barrier #1"), "is in it", "called barrier #1"),
        (Answer(OTHER, "barrier #1"), "called barrier #1", "called barrier #1"),
        (Answer(ABSENT, "has not called it"), "has not called it", "has not called it"),
        (Answer("new", "?"), "gave an answer that is not known here", "gave an answer that is not known here"),
    ],
)
def test_what_is_said_of_an_answer(said: Answer, late: str, called: str) -> None:
    assert (str(said), said.called) == (late, called)
