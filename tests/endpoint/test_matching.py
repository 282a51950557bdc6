"""Which receive takes which message: the matcher against a model that looks through plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.endpoint.matching import ANY_SOURCE, ANY_TAG, Matcher


@dataclass(eq=False)
class Item:
    """A receive or a message."""

    group: int
    source: int
    match_tag: int
    order: int = 0


def fits(receive: Item, message: Item) -> bool:
    wildcard = receive.source == ANY_SOURCE or receive.match_tag == ANY_TAG
    return (
        receive.group == message.group
        and receive.source in (ANY_SOURCE, message.source)
        and receive.match_tag in (ANY_TAG, message.match_tag)
        and (message.match_tag >= 0 or not wildcard)
    )


class Model:
    """The rules, said plainly."""

    def __init__(self) -> None:
        self.posted: list[Item] = []
        self.waiting: list[Item] = []

    def post(self, receive: Item) -> Item | None:
        message = next((message for message in self.waiting if fits(receive, message)), None)
        if message is None:
            self.posted.append(receive)
        else:
            self.waiting.remove(message)
        return message

    def arrive(self, message: Item) -> Item | None:
        receive = next((receive for receive in self.posted if fits(receive, message)), None)
        if receive is None:
            self.waiting.append(message)
        else:
            self.posted.remove(receive)
        return receive

    def repost(self, receive: Item) -> Item | None:
        message = self.post(receive)
        self.posted.sort(key=lambda other: other.order)
        return message


def post(matcher: Matcher[Item, Item], receive: Item, again: bool = False) -> Item | None:
    """As the hub does it."""
    message = matcher.take(receive.group, receive.source, receive.match_tag)
    if message is None:
        (matcher.repost if again else matcher.post)(receive)
    return message


def arrive(matcher: Matcher[Item, Item], message: Item) -> Item | None:
    receive = matcher.take_posted(message.group, message.source, message.match_tag)
    if receive is None:
        matcher.keep(message)
    return receive


groups = st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("post"), groups, st.integers(-1, 2), st.integers(-3, 2)),
        st.tuples(st.just("arrive"), groups, st.integers(0, 2), st.sampled_from([-3, -2, 0, 1, 2])),
        st.tuples(st.sampled_from(["unpost", "discard", "repost"]), st.integers(0, 1000)),
    ),
    max_size=60,
)


class Both:
    """The matcher and the model, given the same to do."""

    def __init__(self) -> None:
        self.matcher: Matcher[Item, Item] = Matcher()
        self.model = Model()
        self.matched: list[Item] = []  # receives whose message may be withdrawn

    def post(self, group: int, source: int, tag: int) -> None:
        receive = Item(group, source, tag)
        assert post(self.matcher, receive) is self.model.post(receive)

    def arrive(self, group: int, source: int, tag: int) -> None:
        message = Item(group, source, tag)
        taker = arrive(self.matcher, message)
        assert taker is self.model.arrive(message)
        if taker is not None:
            self.matched.append(taker)

    def unpost(self, at: int) -> None:
        if self.model.posted:
            receive = self.model.posted.pop(at % len(self.model.posted))
            assert self.matcher.unpost(receive) is True
            assert self.matcher.unpost(receive) is False

    def discard(self, at: int) -> None:
        if self.model.waiting:
            message = self.model.waiting.pop(at % len(self.model.waiting))
            assert self.matcher.discard(message) is True
            assert self.matcher.discard(message) is False

    def repost(self, at: int) -> None:
        if self.matched:
            receive = self.matched.pop(at % len(self.matched))
            assert post(self.matcher, receive, again=True) is self.model.repost(receive)


@given(steps)
def test_matcher_does_what_the_model_does(steps: list[tuple[Any, ...]]) -> None:
    both = Both()
    for verb, *arguments in steps:
        getattr(both, verb)(*arguments)
        assert both.matcher.posted() == both.model.posted
        assert sorted(both.matcher.unexpected(), key=lambda message: message.order) == both.model.waiting
    check_nothing_remains(both.matcher, both.model)


def check_nothing_remains(matcher: Matcher[Item, Item], model: Model) -> None:
    """Once everything is taken out, no key is left: finished tags cost nothing."""
    for receive in model.posted:
        matcher.unpost(receive)
    for message in model.waiting:
        matcher.discard(message)
    assert vars(matcher)["_posted"] == vars(matcher)["_unexpected"] == {}
    assert vars(matcher)["_wildcards"] == 0


@pytest.mark.parametrize(
    "receive, message, match",
    [
        ((0, 1, 5), (0, 1, 5), True),
        ((0, 1, 5), (1, 1, 5), False),
        ((0, 1, 5), (0, 2, 5), False),
        ((0, 1, 5), (0, 1, 6), False),
        ((0, ANY_SOURCE, 5), (0, 2, 5), True),
        ((0, 1, ANY_TAG), (0, 1, 9), True),
        ((0, ANY_SOURCE, ANY_TAG), (0, 7, 0), True),
        ((1, ANY_SOURCE, ANY_TAG), (0, 7, 0), False),
        ((0, 1, ANY_TAG), (0, 1, -2), False),
        ((0, 1, -2), (0, 1, -2), True),
        ((0, ANY_SOURCE, -2), (0, 1, -2), False),
    ],
    ids=str,
)
def test_fit(receive: tuple[int, int, int], message: tuple[int, int, int], match: bool) -> None:
    """Both ways round: the receive first, and the message first."""
    first, second = Matcher[Item, Item](), Matcher[Item, Item]()
    post(first, Item(*receive))
    assert (arrive(first, Item(*message)) is not None) is match
    arrive(second, Item(*message))
    assert (post(second, Item(*receive)) is not None) is match


def test_posted_receives_are_listed_by_source_and_group() -> None:
    matcher: Matcher[Item, Item] = Matcher()
    receives = [Item(0, 1, 1), Item(1, 1, 1), Item(0, 2, 1), Item(0, 1, 2)]
    for receive in receives:
        matcher.post(receive)
    assert matcher.posted(source=1) == [receives[0], receives[1], receives[3]]
    assert matcher.posted(source=1, group=0) == [receives[0], receives[3]]
    assert matcher.posted(group=1) == [receives[1]]


def test_repr_counts() -> None:
    matcher: Matcher[Item, Item] = Matcher()
    matcher.post(Item(0, 1, 1))
    matcher.keep(Item(0, 1, 2))
    matcher.keep(Item(0, 1, 2))
    assert repr(matcher) == "<Matcher 1 receives posted, 2 messages waiting>"
