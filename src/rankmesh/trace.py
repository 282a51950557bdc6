"""One hook that sees every operation: started, then completed or failed. Free when unused.

The place that is traced tests one global, keeps what it found, and so tells the same hook how the operation ended:

    hook = trace.active
    token = None if hook is None else hook.started("send", peer=peer, nbytes=n)
    ...
    if hook is not None:
        hook.completed(token)

Tracing never breaks what it observes: a hook that raises is logged and uninstalled. Hooks are called by whatever thread
runs the operation, maybe many at once and with locks held, so they must be quick and must not call rankmesh.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class Hook(Protocol):
    """What `install` takes."""

    def started(self, op: str, /, **about: object) -> Any:
        """An operation begins; `about` is what is known of it, such as peer, tag and nbytes. Returns its token."""

    def completed(self, token: Any, /) -> None:
        """It ended well. `token` is what `started` returned."""

    def failed(self, token: Any, error: BaseException, /) -> None:
        """It ended with `error`."""


class _Installed:
    """The installed hooks as one, behind which their exceptions stay."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks

    def started(self, op: str, /, **about: object) -> list[tuple[Hook, Any]]:
        tokens = []
        for hook in self.hooks:
            try:
                tokens.append((hook, hook.started(op, **about)))
            except Exception:  # noqa: BLE001  # a hook is the user's code and raises what it likes
                _discard(hook)
        return tokens

    def completed(self, tokens: list[tuple[Hook, Any]], /) -> None:
        for hook, token in tokens:
            try:
                hook.completed(token)
            except Exception:  # noqa: BLE001  # as above
                _discard(hook)

    def failed(self, tokens: list[tuple[Hook, Any]], error: BaseException, /) -> None:
        for hook, token in tokens:
            try:
                hook.failed(token, error)
            except Exception:  # noqa: BLE001  # as above
                _discard(hook)


#: None, or what to report operations to. Read it as `trace.active`: a name imported from here would not change.
active: Hook | None = None
_hooks: tuple[Hook, ...] = ()


def install(hook: Hook) -> None:
    """Report operations that start from now on to `hook`, after those installed before it. Twice is once."""
    uninstall(hook)
    with _lock:
        _set((*_hooks, hook))


def uninstall(hook: Hook) -> None:
    """Stop reporting to `hook`. It still hears how operations end that it saw start. One not installed is ignored."""
    with _lock:
        _set(tuple(other for other in _hooks if other is not hook))


def _set(hooks: tuple[Hook, ...]) -> None:
    global active, _hooks  # noqa: PLW0603  # one test of one global is what makes tracing free when unused
    _hooks = hooks
    active = _Installed(hooks) if hooks else None


def _discard(hook: Hook) -> None:
    _log.exception("The trace hook %r raised and is uninstalled. Fix it and install it again.", hook)
    uninstall(hook)
