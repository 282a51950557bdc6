"""rankmesh's store as a torch.distributed.Store: what torchrun's agents tell each other by.

torch's errors are raised where torch's own stores raise them, since its agents catch those: DistStoreError when a key
does not appear in time, DistNetworkError when the store is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from rankmesh.errors import RankmeshError
from rankmesh.membership.store import StoreClient

P = ParamSpec("P")
T = TypeVar("T")


class AgentStore(Store):
    """Reads wait for their keys, as long as `set_timeout` says (300 s unless told otherwise)."""

    def __init__(self, client: StoreClient, timeout: float) -> None:
        super().__init__()
        self._client = client
        #: Seconds for the store to answer what needs no waiting.
        self._answer = timeout

    def set(self, key: str, value: str | bytes) -> None:
        _ask(self._client.set, key, _bytes(value), self._answer)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._found(keys, self._patience())
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return _ask(self._client.add, key, value, self._answer)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """An expected value of nothing stands for a key that is not there, as in torch's stores."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        if not expected:
            return _ask(self._client.claim, key, desired, self._answer)
        found = _ask(self._client.swap, key, expected, desired, self._answer)
        return expected if found is None else found

    def check(self, keys: Sequence[str]) -> bool:
        return len(_ask(self._client.get_many, keys, 0.0)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._found(keys, self._patience() if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return _ask(self._client.delete, key, self._answer)

    def num_keys(self) -> int:
        return len(_ask(self._client.keys, "", self._answer))

    #: By these names C++ finds them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> AgentStore:
        """The same store: it may be used by many threads."""
        return AgentStore(self._client, self._answer)

    def _patience(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stub leaves it out
        return timeout.total_seconds()

    def _found(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        found = _ask(self._client.get_many, keys, timeout)
        missing = [key for key in keys if key not in found]
        if missing:
            raise DistStoreError(
                f"{', '.join(missing)} did not appear in the store within {timeout:g} s. Look at the output of the "
                "agents that should have set it."
            )
        return found


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _ask(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    except RankmeshError as error:
        raise DistNetworkError(f"The store of the rendezvous does not answer: {error}") from error
