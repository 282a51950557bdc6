"""Rounds of nodes that come and go, as a table and as a game."""

from __future__ import annotations

import random

import pytest

from rankmesh.torch.rounds import State, closed, completed, joined, late, left

MOST = 3


def after(*steps: str) -> State:
    """`+a` joins, `-a` leaves or dies, `!` completes."""
    state = State()
    for step in steps:
        match step[0], step[1:]:
            case "+", node:
                state = joined(state, node, MOST)
            case "-", node:
                state = left(state, {node}, MOST)
            case _:
                state = completed(state)
    return state


@pytest.mark.parametrize(
    "steps, wanted, late_nodes",
    [
        (["+b", "+a"], State(members=("b", "a")), 0),
        (["+b", "+a", "!"], State(complete=True, members=("a", "b")), 0),
        (["+b", "+a", "+c"], State(complete=True, members=("a", "b", "c")), 0),  # full: it begins by itself
        (["+a", "+a"], State(members=("a",)), 0),
        (["+a", "+b", "-a"], State(members=("b",)), 0),
        (["+a", "!", "+b"], State(complete=True, members=("a",), waiting=("b",)), 1),
        (["+a", "!", "+b", "+b"], State(complete=True, members=("a",), waiting=("b",)), 1),
        (["+a", "!", "+b", "-a"], State(round=1, members=("b",)), 0),  # the last member left: the next round is open
        (["+a", "!", "+b", "-a", "+b", "+a"], State(round=1, members=("b", "a")), 0),
        (["+a", "!", "+d", "+c", "+b", "-a"], State(round=1, complete=True, members=("b", "c", "d")), 0),
        (["+a", "!", "+b", "+c", "+d", "+e", "-a"], State(1, True, members=("b", "c", "d"), waiting=("e",)), 0),
        (["+a", "+b", "+c", "+d"], State(complete=True, members=("a", "b", "c"), waiting=("d",)), 0),  # a spare
        (["+a", "+b", "+c", "+d", "-b"], State(complete=True, members=("a", "c"), waiting=("d",)), 1),
        (["+a", "!", "-a"], State(round=1), 0),
    ],
)
def test_rounds(steps: list[str], wanted: State, late_nodes: int) -> None:
    state = after(*steps)
    assert state == wanted
    assert late(state, MOST) == late_nodes


def test_nobody_joins_what_is_closed() -> None:
    state = closed(after("+a", "!"))
    assert joined(state, "b", MOST) == state


def test_members_are_bounded_and_nobody_is_twice() -> None:
    """Whatever happens: at most MOST members, a node in one place at most, rounds only go on."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, state = random.Random(seed), State()
    for _ in range(3000):
        before, node, what = state, dice.choice("abcdef"), dice.randrange(3)
        if what == 0:
            state = joined(state, node, MOST)
        elif what == 1:
            state = left(state, {node, dice.choice("abcdef")}, MOST)
        elif state.members:
            state = completed(state)
        assert len(state.members) <= MOST
        assert len({*state.nodes}) == len(state.nodes)
        assert state.round in (before.round, before.round + 1)
        assert state.members or not state.complete
        if before.complete and state.round == before.round:
            assert {*state.members} <= {*before.members}
