"""Two connections, one survives: the rule as a table, and a simultaneous connect in every order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from rankmesh.endpoint.pool import Verdict, judge

LOW, HIGH = b"\x00" * 16, b"\xff" * 16


@pytest.mark.parametrize(
    "mine, connected, dialing, verdict",
    [
        (LOW, False, False, Verdict.ACCEPT),
        (HIGH, False, False, Verdict.ACCEPT),
        (LOW, True, False, Verdict.REFUSE),
        (HIGH, True, False, Verdict.REFUSE),
        (LOW, True, True, Verdict.REFUSE),
        (HIGH, True, True, Verdict.REFUSE),
        (LOW, False, True, Verdict.ACCEPT),
        (HIGH, False, True, Verdict.REFUSE),
    ],
)
def test_verdict(mine: bytes, connected: bool, dialing: bool, verdict: Verdict) -> None:
    theirs = HIGH if mine == LOW else LOW
    assert judge(mine, theirs, connected=connected, dialing=dialing) is verdict


@dataclass(frozen=True)
class Side:
    """What one side knows. `attempt`: its own connection has reached it knows not whom, or a known peer, or is over."""

    uid: bytes
    attempt: str = "unknown"
    #: The connections it holds for good.
    connected: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class World:
    """Both sides, and per connection (named after who opened it) the messages under way in order."""

    low: Side
    high: Side
    #: (connection, message), oldest first.
    under_way: tuple[tuple[str, str], ...]

    def send(self, connection: str, message: str) -> World:
        return replace(self, under_way=(*self.under_way, (connection, message)))

    def side(self, name: str) -> Side:
        return self.low if name == "low" else self.high

    def with_side(self, name: str, side: Side) -> World:
        return replace(self, low=side) if name == "low" else replace(self, high=side)


def other(name: str) -> str:
    return "high" if name == "low" else "low"


def deliver(world: World, connection: str, message: str) -> World:
    """A message of the handshake arrives, and its receiver acts."""
    rest = list(world.under_way)
    rest.remove((connection, message))
    return REACTIONS[message](replace(world, under_way=tuple(rest)), connection)


def on_hello(world: World, connection: str) -> World:
    return world.send(connection, "challenge")


def on_challenge(world: World, opener: str) -> World:
    """The opener learns whom it reached. Where it is connected with them already, it stops before it proves itself."""
    side = world.side(opener)
    if side.attempt == "over":
        return world
    if side.connected:
        return world.with_side(opener, replace(side, attempt="over"))
    return world.with_side(opener, replace(side, attempt="known")).send(opener, "auth")


def on_auth(world: World, opener: str) -> World:
    side = world.side(other(opener))
    theirs = world.side(opener).uid
    verdict = judge(side.uid, theirs, connected=bool(side.connected), dialing=side.attempt == "known")
    if verdict is Verdict.REFUSE:
        return world.send(opener, "refuse")
    attempt = "over" if side.attempt == "known" else side.attempt  # one that knows not whom it reached goes on
    accepted = replace(side, connected=side.connected | {opener}, attempt=attempt)
    return world.with_side(other(opener), accepted).send(opener, "welcome")


def on_welcome(world: World, opener: str) -> World:
    side = world.side(opener)
    if side.attempt == "over":
        return world
    return world.with_side(opener, replace(side, attempt="over", connected=side.connected | {opener}))


def on_refuse(world: World, opener: str) -> World:
    return world.with_side(opener, replace(world.side(opener), attempt="over"))


REACTIONS: dict[str, Callable[[World, str], World]] = {
    "hello": on_hello,
    "challenge": on_challenge,
    "auth": on_auth,
    "welcome": on_welcome,
    "refuse": on_refuse,
}


def test_of_two_simultaneous_connections_exactly_one_survives_in_every_order_of_messages() -> None:
    """Every interleaving: the two handshakes are independent streams, each in order."""
    start = World(Side(LOW), Side(HIGH), (("low", "hello"), ("high", "hello")))
    todo, seen, ends = [start], {start}, 0
    while todo:
        world = todo.pop()
        first = dict(reversed(world.under_way))
        if not first:
            assert world.low.connected == world.high.connected, "the sides kept different connections"
            assert len(world.low.connected) == 1
            ends += 1
        for connection, message in first.items():
            following = deliver(world, connection, message)
            if following not in seen:
                seen.add(following)
                todo.append(following)
    assert ends >= 1
    assert len(seen) > 20
