"""How far apart ranks run, as their writes tell."""

from __future__ import annotations

from rankmesh.collectives.distance import LEAST, Distance

QUICK, SLOW = 1 / 30e9, 1 / 3e9


def far(rank: int = 0) -> Distance:
    distance = Distance(rank, 3)
    for _ in range(3):
        distance.wrote(LEAST, LEAST * SLOW)
    return distance


def test_ranks_are_near_until_three_writes_in_a_row_were_slow() -> None:
    distance = Distance(0, 3)
    for seconds in (SLOW, SLOW, QUICK, SLOW, SLOW):
        distance.wrote(LEAST, LEAST * seconds)
        assert not distance.pulls(0)
    distance.wrote(LEAST, LEAST * SLOW)
    assert distance.pulls(0)


def test_one_quick_write_says_that_they_are_near() -> None:
    distance = far()
    distance.wrote(8 * LEAST, 8 * LEAST * QUICK)
    assert not distance.pulls(0)


def test_ever_more_seldom_a_call_goes_through_slots_to_see() -> None:
    distance = far()
    ways = [distance.pulls(0) for _ in range(400)]
    probes = [at for at, pulled in enumerate(ways) if not pulled]
    assert probes == [1, 4, 9, 18, 35, 68, 133, 198, 263, 328, 393]
    distance.wrote(LEAST, LEAST * SLOW)
    assert distance.pulls(0), "it is as it was"
    distance.wrote(LEAST, LEAST * QUICK)
    for _ in range(3):
        assert not distance.pulls(0)
        distance.wrote(LEAST, LEAST * SLOW)
    assert [distance.pulls(0) for _ in range(5)] == [True, False, True, True, False]


def test_others_do_as_each_leader_did() -> None:
    distance = far(rank=1)
    assert not distance.pulls(0), "what its own writes took does not count"
    distance.follow(0, True)
    assert distance.pulls(0)
    assert not distance.pulls(2)
    assert distance.pulls(1), "it leads"
    distance.follow(0, False)
    assert not distance.pulls(0)
