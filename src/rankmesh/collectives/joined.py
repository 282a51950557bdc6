"""Joined: several collectives of one call, as one Work."""

from __future__ import annotations

from time import monotonic
from typing import Any

from rankmesh.collectives.running import Collective
from rankmesh.endpoint.work import Work
from rankmesh.errors import RankmeshError


class Joined(Work[Any]):
    """Ends when all have ended: with the value of the first, which is the call's, or with the first error. Who gives it
    up gives up all."""

    def __init__(self, parts: list[Collective]) -> None:
        first = parts[0]
        super().__init__(first._engine, first.op, first.peer, None, first.timeout)
        self._parts = parts
        for part in parts:
            part.add_done_callback(self._one_ended)

    def _one_ended(self, _: Work[Any]) -> None:
        with self._engine:
            self._settle()

    def _settle(self) -> None:
        if self.finished or not all(part.finished for part in self._parts):
            return
        error = next((part._error for part in self._parts if part._error is not None), None)
        if error is not None:
            self.fail(error)
        else:
            self.finish(self._parts[0]._value)

    def await_end(self, timeout: float | None) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        for part in self._parts:
            if not part.finished:
                part.await_end(None if deadline is None else max(deadline - monotonic(), 0.0))
        self._settle()

    def _give_up(self, error: RankmeshError) -> None:
        for part in self._parts:
            part._give_up(error)
        self._settle()  # unless one is busy with its caller's memory: then that one's end is this one's
