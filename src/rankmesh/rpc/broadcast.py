"""One call to many, and its results as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from rankmesh.endpoint.progress import Engine
from rankmesh.endpoint.waiting import Until
from rankmesh.endpoint.work import Work
from rankmesh.errors import RankmeshError
from rankmesh.rpc.client import Call


class Broadcast:
    """Calls under way at many. Iterate over (whom, Work) as they end, in whatever order; each Work is done."""

    def __init__(self, engine: Engine, calls: Sequence[tuple[Any, Call]]) -> None:
        self._engine = engine
        self._pending = dict.fromkeys(calls)
        for _, call in calls:
            try:
                call.begin()
            except RankmeshError as error:  # one that cannot be reached is one outcome among others
                with engine:
                    call.fail(error)

    def _ended(self) -> list[tuple[Any, Work[Any]]]:
        ended = [entry for entry in self._pending if entry[1].finished]
        for entry in ended:
            del self._pending[entry]
        return list(ended)

    def __iter__(self) -> Iterator[tuple[Any, Work[Any]]]:
        try:
            while self._pending:
                deadline = min(call.began + call.timeout for _, call in self._pending)
                with self._engine:
                    self._engine.drive(Until(lambda: any(call.finished for _, call in self._pending)), deadline)
                if monotonic() >= deadline:
                    self._expire()
                yield from self._ended()
        finally:
            self.cancel()

    def _expire(self) -> None:
        """End those whose time is up."""
        for _, call in self._pending:
            call.expire()

    async def __aiter__(self) -> AsyncIterator[tuple[Any, Work[Any]]]:
        import asyncio

        queue: asyncio.Queue[tuple[Any, Call]] = asyncio.Queue()

        async def settle(entry: tuple[Any, Call]) -> None:
            with suppress(Exception):  # whoever takes the Work asks it for its result
                await entry[1]
            queue.put_nowait(entry)

        tasks = [asyncio.ensure_future(settle(entry)) for entry in self._pending]
        try:
            while self._pending:
                entry = await queue.get()
                del self._pending[entry]
                yield entry
        finally:
            for task in tasks:
                task.cancel()
            self.cancel()

    def results(self) -> dict[Any, Any]:
        """Wait for all; whom → result. Raises the first error there is."""
        return {to: work.result() for to, work in self}

    def cancel(self) -> None:
        """Give up those that have not ended."""
        for _, call in self._pending:
            call.cancel()
