"""Rounds of nodes that come and go: the state that the agents of torchrun share, and how it changes. Pure.

1. A round is open, and nodes join it, until it is complete: full, or long enough with as many nodes as are needed.
   Its members then have ranks: they are in order.
2. Who comes to a complete round waits for the next. The members hear of it (`late`), and leave the round one after the
   other, to join the next; when the last has left, or is dead, the next round is open, and those who waited are in it.
   Where a round is full, they are spares, and nobody is disturbed.
3. Closed is for ever.

A change is a function of a state. Agents apply it by compare-and-set, and again where another was faster.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class State(msgspec.Struct, frozen=True):
    """One round, and those who wait for the next."""

    round: int = 0
    complete: bool = False
    closed: bool = False
    members: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.members, *self.waiting)


def joined(state: State, node: str, most: int) -> State:
    """`node` is a member of the open round, or waits."""
    if state.closed or node in state.members or (state.complete and node in state.waiting):
        return state
    if state.complete:
        return msgspec.structs.replace(state, waiting=(*state.waiting, node))
    others = tuple(one for one in state.waiting if one != node)
    grown = msgspec.structs.replace(state, members=(*state.members, node), waiting=others)
    return completed(grown) if len(grown.members) == most else grown


def completed(state: State) -> State:
    """The open round begins. Nodes of one host have neighbouring ranks, since their names begin alike."""
    return msgspec.structs.replace(state, complete=True, members=tuple(sorted(state.members)))


def left(state: State, nodes: Collection[str], most: int) -> State:
    """`nodes` left, or are dead."""
    members = tuple(one for one in state.members if one not in nodes)
    waiting = tuple(one for one in state.waiting if one not in nodes)
    if members or not state.complete:
        return msgspec.structs.replace(state, members=members, waiting=waiting)
    opened = State(state.round + 1, closed=state.closed, members=waiting[:most], waiting=waiting[most:])
    return completed(opened) if len(opened.members) == most else opened


def closed(state: State) -> State:
    return msgspec.structs.replace(state, closed=True)


def late(state: State, most: int) -> int:
    """Nodes for whose sake the members should begin another round."""
    return len(state.waiting) if state.complete and len(state.members) < most else 0
