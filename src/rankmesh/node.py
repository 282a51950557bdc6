"""Endpoint and Peer as users have them: messages from below, RPC and memory on top. The composition root without ranks.

The layers do not know of each other: `endpoint` carries services and knows none, `rpc` and `memory` stand on
`endpoint`. Here they are put together. The agent of RPC is made when it is first used. That of memory is there from the
beginning: others may wait for regions before there is any.
"""

from __future__ import annotations

from typing import Any

from rankmesh import endpoint
from rankmesh.endpoint.work import Work
from rankmesh.memory import MemoryAgent, RegionInfo, RemoteRegion
from rankmesh.rpc import Channel, Ref, RpcAgent, Stream


class Peer(endpoint.Peer):
    """Another endpoint: messages to and from it, calls of its functions, its memory. `Endpoint.connect()` and
    `Endpoint.accept()` make them."""

    def __init__(self, owner: Endpoint, **about: Any) -> None:
        super().__init__(owner.hub, owner.messages, **about)
        self._owner = owner

    def call(
        self,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        out: Any = None,
        returns: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function there and wait for its result. As `RpcAgent.call`."""
        return self._owner.rpc.call(self, function, *args, timeout=timeout, out=out, returns=returns, **kwargs)

    def call_async(
        self,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        out: Any = None,
        returns: Any = None,
        **kwargs: Any,
    ) -> Work[Any]:
        """Like `call`, without waiting."""
        return self._owner.rpc.call_async(self, function, *args, timeout=timeout, out=out, returns=returns, **kwargs)

    def notify(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Call a function there without waiting for it."""
        self._owner.rpc.notify(self, function, *args, timeout=timeout, **kwargs)

    def stream(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Stream:
        """Iterate over what a generator there yields."""
        return self._owner.rpc.stream(self, function, *args, timeout=timeout, **kwargs)

    def channel(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Channel:
        """Converse with a function there."""
        return self._owner.rpc.channel(self, function, *args, timeout=timeout, **kwargs)

    def remote(self, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Ref:
        """Call a function there and leave its result where it is."""
        return self._owner.rpc.remote(self, function, *args, timeout=timeout, **kwargs)

    def open(self, name: str, *, wait: bool = False, timeout: float | None = None) -> RemoteRegion:
        """A region of memory there, to read and write. As `MemoryAgent.open`."""
        return self._owner.memory.open(self, name, wait=wait, timeout=timeout)

    def regions(self, timeout: float | None = None) -> list[RegionInfo]:
        """The regions that one may open there."""
        return self._owner.memory.list(self, timeout=timeout)


class Endpoint(endpoint.Endpoint):
    """Listens on an address, connects to other endpoints, exchanges messages with each of them, calls functions, and
    reads and writes memory.

    All methods may be used from many threads. After `fork()` the child's copy raises ClosedError.
    """

    #: Memory that others may read and write, and theirs.
    memory: MemoryAgent
    _rpc: RpcAgent | None = None

    def _serve(self) -> None:
        self.memory = MemoryAgent(self)

    def _make_peer(self, **about: Any) -> Peer:
        return Peer(self, **about)

    @property
    def rpc(self) -> RpcAgent:
        """Functions that others may call, and calls of theirs."""
        if self._rpc is None:
            with self.hub.engine:
                if self._rpc is None:
                    self._rpc = RpcAgent(self)
        return self._rpc

    @property
    def peers(self) -> list[Peer]:  # type: ignore[override]  # those that `_make_peer` made
        """The peers that are connected."""
        return super().peers  # type: ignore[return-value]

    def connect(self, target: str | dict[str, Any], timeout: float | None = None) -> Peer:
        """Connect to an address, or to what another endpoint's `info()` returned; wait until it is there."""
        return super().connect(target, timeout)  # type: ignore[return-value]

    def accept(self, timeout: float | None = None) -> Peer:
        """Wait for an endpoint that connects to this one and was not yet accepted."""
        return super().accept(timeout)  # type: ignore[return-value]
