"""MemoryAgent: regions of this endpoint that others may use, and theirs. One per endpoint; a mesh and each of its
groups address it by ranks of their own (`among`).

Whose region is meant is a rank (of a mesh or a group) or a Peer; oneself, too. Every wait takes `timeout` in seconds
(None: Config.timeout).
"""

from __future__ import annotations

import copy
import logging
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from rankmesh.endpoint import Endpoint, Peer
from rankmesh.endpoint.ranks import Ranks
from rankmesh.endpoint.router import Router
from rankmesh.errors import UsageError
from rankmesh.memory.flow import Flow
from rankmesh.memory.mapping import SharedMemory
from rankmesh.memory.operations import Opening, Query
from rankmesh.memory.protocol import (
    MOST,
    REQUEST,
    SERVICE,
    Bit,
    Op,
    RegionInfo,
    decode_list,
    encode_name,
    info_of,
)
from rankmesh.memory.rails import Rails
from rankmesh.memory.region import Region
from rankmesh.memory.remote import RemoteRegion
from rankmesh.memory.server import MemoryServer
from rankmesh.memory.watching import RegionWatch

logger = logging.getLogger("rankmesh")

_Infos = list[RegionInfo]  # `list` means something else in the class below
#: Whose regions are meant.
Where = int | Peer | Endpoint


def _dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Raises UsageError for what is none, and for what memory of others' cannot have."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"dtype= is one of numpy's, and not {dtype!r}: {error}. Pass such a one.") from error
    if kind.hasobject:
        raise UsageError(f"Elements of {kind} are references to memory of this process alone. Pass another dtype.")
    if kind.subdtype is not None:
        raise UsageError(f"{kind} has a shape of its own. Pass {kind.base} as dtype=, and the whole shape as shape=.")
    return kind


def _extents_of(shape: Any) -> tuple[int, ...]:
    """As ints: numpy's overflow. Raises UsageError."""
    try:
        extents = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise UsageError(f"shape= is a whole number or several, and not {shape!r}. Pass ints.") from None
    if any(extent < 0 for extent in extents):
        raise UsageError(f"No shape has a negative extent: {extents}. Pass how many elements there are.")
    return extents


class MemoryAgent:
    """Memory between this endpoint and others. All methods may be used from many threads."""

    #: Whom numbers mean. An endpoint has none.
    _ranks: Ranks | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        """With the engine's lock."""
        self._endpoint = endpoint
        self._hub = endpoint.hub
        self._config = endpoint.config
        self._oneself: Router | None = None
        self._flows: dict[int, Flow] = {}
        self._rails: dict[int, Rails] = {}
        self._server = server = MemoryServer(self._hub, self._sweep)
        endpoint.attach(SERVICE, server.on_request, server.on_lone, self)

    def among(self, ranks: Ranks) -> MemoryAgent:
        """This agent, for whom numbers mean these ranks. Everything else is the same: regions, connections."""
        agent = copy.copy(self)
        agent._ranks = ranks
        return agent

    # ------------------------------------------------------------------ regions of one's own

    def register(
        self, name: str, buffer: Any, access: str = "rw", *, allow: Iterable[Peer | int | str] | None = None
    ) -> Region:
        """Let others read and write `buffer`, where it lies, under `name`.

        `buffer`: a numpy array, a bytearray, a memoryview, an mmap, a CPU tensor (bfloat16 and float8, too);
        contiguous, and kept alive by the region. `access`: "r", "w" or "rw". `allow`: who may use it (Peers, ranks,
        names of peers); None: everybody that is connected. A name is what a peer calls itself: whoever has the token
        can take any, so names keep mistakes out, and nobody else. A region's name is used once at a time, by whichever
        group it is registered.
        """
        encode_name(name)
        region = Region(self._server, name, buffer, access, self._server.new_generation())
        return self._add(region, allow)

    def allocate(
        self,
        name: str,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: DTypeLike = np.uint8,
        *,
        access: str = "rw",
        allow: Iterable[Peer | int | str] | None = None,
    ) -> Region:
        """Register new memory, all zeros, that peers on this host may map: reads and writes of theirs are plain copies.
        It is the region's `array`."""
        encode_name(name)
        kind, extents = _dtype_of(dtype), _extents_of(shape)
        nbytes = kind.itemsize * math.prod(extents)
        if not 0 < nbytes <= MOST:
            raise UsageError(f"Shape {extents} of {kind} has {nbytes} bytes. Ask for some, and no more than there are.")
        generation = self._server.new_generation()
        shared = self._shared(nbytes, generation, access)
        memory = np.zeros(extents, kind) if shared is None else np.frombuffer(shared.data, kind).reshape(extents)
        return self._add(Region(self._server, name, memory, access, generation, shared), allow)

    @staticmethod
    def _shared(nbytes: int, generation: int, access: str) -> SharedMemory | None:
        """What is mapped can be read: a region that may only be written is not shared."""
        if access == "w":
            return None
        try:
            return SharedMemory(nbytes, generation, writable="w" in access)
        except OSError as error:
            logger.warning("No shared memory for a region of %d bytes: %s.", nbytes, error.strerror or error)
            return None

    def _add(self, region: Region, allow: Iterable[Peer | int | str] | None) -> Region:
        region.ranks = self._ranks
        region.allow(allow)
        with self._hub.engine:
            self._server.add(region)
        return region

    def unregister(self, region: str | Region, *, abort: bool = False, timeout: float | None = None) -> None:
        """Take a region back. Nobody can begin to use it from now on; on return nobody does, and its memory is the
        caller's alone. Transfers under way are waited for (DeadlineError: some still were), or with `abort` ended: they
        fail with StaleRegion."""
        if isinstance(region, str):
            found = self._server.find(region)
            if found is None:
                raise UsageError(f"There is no region {region!r} to unregister. See `regions` for those there are.")
            region = found
        if region.server is not self._server:
            raise UsageError(f"{region!r} is a region of another endpoint. Unregister it there.")
        self._server.unregister(region, abort, timeout)

    @property
    def regions(self) -> dict[str, Region]:
        """One's own, by name."""
        return dict(self._server.regions)

    # ------------------------------------------------------------------ regions of others

    def open(self, where: Where, name: str, *, wait: bool = False, timeout: float | None = None) -> RemoteRegion:
        """Look a region up now. RegionNotFound if there is none; with `wait`, wait until it is registered."""
        encoded = encode_name(name)
        flow = self._flow(where)
        bits = Bit.MAP | Bit.WAIT if wait else Bit.MAP
        body = REQUEST.pack(Op.OPEN, bits, len(encoded), 0, 0, 0, 0) + encoded
        query = Opening(flow, name, body, self._seconds(timeout))
        with flow.opening():
            description = query.complete()
            with self._hub.engine:
                rails = self._rails.setdefault(flow.router.index, Rails(flow))
                return RemoteRegion(flow, rails, info_of(description), flow.map(description))

    def list(self, where: Where, *, timeout: float | None = None) -> _Infos:
        """The regions that one may open there."""
        flow = self._flow(where)
        body = REQUEST.pack(Op.LIST, 0, 0, 0, 0, 0, 0)
        query = Query(flow, "", "list", body, self._seconds(timeout), decode_list)
        return [info_of(description) for description in query.complete()]

    def watch(self, where: Where, *, timeout: float | None = None) -> RegionWatch:
        """See regions come and go there; those that are there come first."""
        return RegionWatch.begin(self._flow(where), self._seconds(timeout), self._config.timeout)

    def stats(self) -> dict[str, int]:
        """Counters since the beginning, and what is under way."""
        server = self._server
        with self._hub.engine:
            moving = sum(len(region.moving) for region in server.regions.values())
            return {
                "regions": len(server.regions),
                "served": server.served,
                "refused": server.refused,
                "transfers": moving,
            }

    def __repr__(self) -> str:
        return f"<MemoryAgent of {self._endpoint.name!r}: {len(self._server.regions)} regions>"

    # ------------------------------------------------------------------ who is who

    def _seconds(self, timeout: float | None) -> float:
        return self._config.timeout if timeout is None else timeout

    def _flow(self, where: Where) -> Flow:
        router = self._router(where)
        with self._hub.engine:
            self._hub.check_open()
            flow = self._flows.get(router.index)
            if flow is None:
                flow = self._flows[router.index] = Flow(router)
            return flow

    def _router(self, where: Where) -> Router:
        if isinstance(where, Peer):
            return where.router
        ranks = self._ranks
        if isinstance(where, int | np.integer) and ranks is not None:
            return ranks.router(int(where))
        if where is self._endpoint:
            if self._oneself is None:
                with self._hub.engine:
                    self._oneself = self._endpoint.oneself().router
            return self._oneself
        raise UsageError(f"{where!r} is no {'Peer' if ranks is None else 'rank or Peer'} of this endpoint. Pass one.")

    # ------------------------------------------------------------------ as an agent of the endpoint

    def needs(self, router: Router) -> bool:
        flow = self._flows.get(router.index)
        return self._server.needs(router) or (flow is not None and flow.needed)

    def _sweep(self, router: Router) -> None:
        flow = self._flows.get(router.index)
        if flow is not None:
            flow.sweep()

    def peer_lost(self, router: Router) -> None:
        self._server.peer_lost(router)
        flow = self._flows.pop(router.index, None)
        if flow is not None:
            flow.abandon(router.lost_error)
        rails = self._rails.pop(router.index, None)
        if rails is not None:
            self._hub.engine.defer(rails.close)

    def closing(self) -> None:
        self._server.closing()
        for flow in self._flows.values():
            flow.abandon(self._hub.closed_error)

    def closed(self) -> None:
        """Descriptors go; the memory stays as long as somebody refers to it."""
        self._server.free()
        for rails in self._rails.values():
            rails.close()
