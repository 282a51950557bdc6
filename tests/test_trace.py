"""The trace hook: what it hears, what happens when it raises, and that nothing is there when nobody listens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rankmesh import trace


class Recorder:
    """Notes what it hears; raises in the methods named in `broken`."""

    def __init__(self, *broken: str) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.broken = broken

    def _note(self, *what: Any) -> None:
        self.heard.append(what)
        if what[0] in self.broken:
            raise LookupError(what[0])

    def started(self, op: str, /, **about: object) -> int:
        self._note("started", op, about)
        return len(self.heard)

    def completed(self, token: Any, /) -> None:
        self._note("completed", token)

    def failed(self, token: Any, error: BaseException, /) -> None:
        self._note("failed", token, error)


@pytest.fixture(autouse=True)
def _no_hook_before_and_after() -> Iterator[None]:
    assert trace.active is None
    yield
    assert trace.active is None, "the test left a hook installed"


def operation(error: BaseException | None = None) -> None:
    """What a traced place does."""
    hook = trace.active
    token = None if hook is None else hook.started("send", peer="rank 1", nbytes=64)
    if hook is not None:
        if error is None:
            hook.completed(token)
        else:
            hook.failed(token, error)


def test_hook_hears_start_and_end_with_its_own_token() -> None:
    recorder, error = Recorder(), ValueError("x")
    trace.install(recorder)
    operation()
    operation(error)
    trace.uninstall(recorder)
    operation()
    about = {"peer": "rank 1", "nbytes": 64}
    assert recorder.heard == [
        ("started", "send", about),
        ("completed", 1),
        ("started", "send", about),
        ("failed", 3, error),
    ]


def test_several_hooks_each_get_their_token() -> None:
    first, second = Recorder(), Recorder()
    trace.install(first)
    operation()
    trace.install(second)
    operation()
    trace.uninstall(first)
    trace.uninstall(second)
    assert [heard[:2] for heard in first.heard] == [
        ("started", "send"),
        ("completed", 1),
        ("started", "send"),
        ("completed", 3),
    ]
    assert [heard[:2] for heard in second.heard] == [("started", "send"), ("completed", 1)]


def test_install_twice_is_once_and_uninstalling_a_stranger_is_nothing() -> None:
    recorder = Recorder()
    trace.install(recorder)
    trace.install(recorder)
    trace.uninstall(Recorder())
    operation()
    assert len(recorder.heard) == 2
    trace.uninstall(recorder)


def test_hook_hears_the_end_of_what_it_saw_start() -> None:
    recorder = Recorder()
    trace.install(recorder)
    hook = trace.active
    assert hook is not None
    token = hook.started("recv")
    trace.uninstall(recorder)
    hook.completed(token)
    assert recorder.heard[-1] == ("completed", 1)


@pytest.mark.parametrize("method", ["started", "completed", "failed"])
def test_hook_that_raises_is_logged_and_uninstalled_and_others_go_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Recorder(method), Recorder()
    trace.install(broken)
    trace.install(sound)
    with caplog.at_level(logging.ERROR, "rankmesh.trace"):
        for _ in range(2):
            operation(OSError() if method == "failed" else None)
    trace.uninstall(sound)
    assert [heard[0] for heard in broken.heard].count(method) == 1
    assert len(sound.heard) == 4
    (record,) = caplog.records
    assert "is uninstalled" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is LookupError
