"""Work: one or several operations of rankmesh as torch's handle.

- `wait` waits in the calling thread, which drives the engine itself, and raises rankmesh's errors.
- `get_future` makes a torch future, which the thread that ends the operation completes. Its consumers are of two kinds.
  Python's `wait` and `value` raise rankmesh's error. C++ (DDP's reducer) looks for tensors in the value: that of a
  failed operation raises the error there (`_Failure`). An exception as such would be taken for a value without tensors.
- A future that is asked for during a backward pass is DDP's. Its operation is waited for when the pass has come to its
  end, before the reducer does so: in the thread that called `backward`, which drives, and to which rankmesh's error
  then comes as it is. The reducer itself could only wait for the background thread, and raise a RuntimeError.
  Until then the operation may be left alone (`postpone`): where ranks are as many as cores, all of it is computing.
  For the same reason an operation that cannot be begun there is one that fails (`Failed`).
- Callbacks of a future run on the thread that completes it. They may start operations and wait for them: such waits
  drive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from rankmesh import endpoint
from rankmesh.errors import RankmeshError
from rankmesh.torch.staging import Conclude


def in_backward() -> bool:
    """Whether this thread is in a backward pass: C++ called, and whatever is raised here goes through it."""
    return bool(torch._C._current_graph_task_id() != -1)


class Failed:
    """In the place of an operation that could not be begun: waiting for it raises why."""

    def __init__(self, error: RankmeshError) -> None:
        self.error: BaseException | None = error
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def postpone(self) -> None:
        """It has ended."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


Part = endpoint.Work[Any] | Failed


class Work(c10d.Work):
    """What the calls of a process group return."""

    # Defaults on the class: what is done at once never sets them.
    concludes: Sequence[Conclude] = ()
    _future: Future | None = None
    _lock: threading.Lock | None = None

    def __init__(self, parts: Sequence[Part], outputs: Any, concludes: Sequence[Conclude] = ()) -> None:
        """`concludes`: what is left to do when all parts have ended well."""
        super().__init__()
        self.parts = parts
        self._outputs = outputs
        if concludes:
            self.concludes = concludes
            self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise what went wrong. With a `timeout` that runs out the operation is given up."""
        seconds = timeout.total_seconds() if timeout else None  # torch's "none" is zero
        for part in self.parts:
            part.result(seconds)
        if self._lock is not None:
            self._conclude()
        return True

    def _conclude(self) -> None:
        """Once, and whoever comes second comes back when it is done."""
        assert self._lock is not None
        with self._lock:
            for conclude in self.concludes:
                conclude()
            self.concludes = ()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(part.done() for part in self.parts)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for part in self.parts if (error := part.error) is not None), None)

    def result(self) -> Any:
        """The tensors that were written to."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Who sent what was received."""
        return int(self.parts[0].result().source)

    _source_rank = source_rank

    def get_future(self) -> Future:
        if self._future is None:
            self._future = Future(self)
            if in_backward():
                for part in self.parts:
                    part.postpone()
                torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return self._future

    def get_future_result(self) -> Future:
        return self.get_future()

    def __repr__(self) -> str:
        error = self.exception()
        state = f"failed: {error}" if error is not None else "done" if self.is_completed() else "under way"
        return f"<rankmesh.torch.Work of {len(self.parts)} operation(s): {state}>"


class Future(torch.futures.Future[Any]):
    """Of a Work. Its `wait` drives the engine."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        #: None once it is done: the work refers to its future.
        self._work: Work | None = work
        self._awaited = len(work.parts)
        self._lock = threading.Lock()
        for part in work.parts:
            part.add_done_callback(self._one_ended)
        if not work.parts:
            self._complete()

    def wait(self) -> Any:
        work = self._work
        if work is not None:
            try:
                work.wait()
            except Exception:  # noqa: BLE001, S110  # this is the outcome, which comes below
                pass
        return super().wait()

    def _one_ended(self, _: object) -> None:
        with self._lock:
            self._awaited -= 1
            is_last = not self._awaited
        if is_last:
            self._complete()

    def _complete(self) -> None:
        """Callbacks that were added run here, and may raise what they like: torch hands it to their own futures."""
        work, self._work = self._work, None
        assert work is not None, "it ends once"
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001  # an operation's, or a copy's: the consumer gets it
            self._set_unwrap_func(_raise)
            self.set_result(_Failure(error))
        else:
            self.set_result(work._outputs)


class _Failure:
    """What a failed operation's future holds. C++ looks for tensors in it by means of pickle."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self.error


def _raise(value: Any) -> Any:
    if isinstance(value, _Failure):
        raise value.error
    return value
