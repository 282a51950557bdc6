"""How connections come about: listeners, attempts of our own, and which of two is kept. All methods need the
engine's lock.

An attempt (`Dial`) belongs to a router. It looks the name up on a helper thread, tries the addresses in turn with
back-off until its deadline, and ends in one of three ways: the router has a link (from this attempt or from the
other side's), the peer turns out to be connected already, or the attempt failed and says why.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from rankmesh.endpoint.admission import Admission, Closed
from rankmesh.endpoint.pool import Verdict, judge
from rankmesh.endpoint.refusals import CLOSED, CLOSING, Refusals
from rankmesh.endpoint.shortcut import NETWORKED, Shortcut, carrier
from rankmesh.endpoint.work import Work
from rankmesh.errors import ConfigError, ConnectError, RankmeshError
from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Listener
from rankmesh.transport.registry import transport_for
from rankmesh.wire.handshake import Refusal, Refused
from rankmesh.wire.messages import Identity, plain

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.peer import Peer
    from rankmesh.endpoint.router import PeerRouter

logger = logging.getLogger("rankmesh")

#: Connections accepted before other events get their turn.
ACCEPTS_PER_TURN: Final = 32
#: Seconds a listener rests when the process has no descriptors left: accepting again at once would burn a core.
ACCEPT_PAUSE: Final = 0.2

_IN: Final = select.EPOLLIN
_NETWORKED: Final = tuple(f"{scheme}://" for scheme in NETWORKED)

#: Refusals that trying again cannot mend.
_FINAL: Final = frozenset({Refusal.TOKEN, Refusal.VERSION, Refusal.WORLD, Refusal.CLOSING})


class Dial:
    """An attempt to reach a peer."""

    def __init__(
        self,
        connector: Connector,
        router: PeerRouter,
        addresses: list[Address],
        deadline: float,
        work: Work[Peer] | None,
    ) -> None:
        self.router = router
        #: Somebody waits for this peer in connect().
        self.work = work
        #: A patient attempt goes on until its deadline, because the other side may yet be started. Without patience
        #: a refused connection means that the peer, which was there, is gone.
        self.patient = work is not None
        self.deadline = deadline
        self.remote_uid = router.peer.uid
        self.trouble = "connecting"
        self._connector = connector
        self._names = addresses
        self._numeric: list[Address] = []
        self._next = 0
        self._backoff = connector.hub.config.connect_backoff[0]
        self.admission: Admission | None = None
        self._over = False
        #: On the way over shared memory; why that way failed.
        self._on_shortcut = False
        self.no_shm = ""

    @property
    def where(self) -> str:
        return ", ".join(map(str, self._names))

    def start(self) -> None:
        """Look the names up, on a thread of its own: a resolver may block for many seconds."""

        def resolve() -> None:
            found: list[Address] = []
            error: OSError | None = None
            for name in self._names:
                try:
                    found += transport_for(name).resolve(name)
                except OSError as problem:
                    error = problem
            self._connector.hub.engine.call_soon(lambda: self._resolved(found, error))

        if all(address.ip is not None or address.is_name for address in self._names):
            self._resolved(self._names, None)
        else:
            threading.Thread(target=resolve, name="rankmesh-resolve", daemon=True).start()

    def cancel(self) -> None:
        """Forget the attempt: the router has a link, or nobody wants one any more."""
        self._over = True
        if self.admission is not None:
            self.admission.drop(abort=False)  # the other side reads who we are, and knows that nothing is wrong

    def reached(self, peer: Peer) -> None:
        """The peer is connected; it may be one that was known already."""
        if self.work is not None and not self.work.finished:
            self.work.finish(peer)

    def _resolved(self, found: list[Address], error: OSError | None) -> None:
        if self._over:
            return
        if not found:
            self._attempt_failed(error or OSError("the name has no address"))
            return
        self._numeric = found
        self._attempt()

    def _attempt(self) -> None:
        if self._over:
            return
        if not self._numeric:
            self.start()
            return
        self._on_shortcut = False
        address = self._numeric[self._next % len(self._numeric)]
        try:
            link = transport_for(address).connect(address, self._connector.hub.config)
        except OSError as error:
            self._attempt_failed(error)
            return
        self._admit(link)

    def _admit(self, link: Link) -> None:
        remaining = max(self.deadline - monotonic(), 0.001)
        self._connector.admit(link, self, min(remaining, self._connector.hub.config.handshake_timeout))

    def take_shortcut(self, name: bytes) -> None:
        """The other side is in the same place: go on over shared memory."""
        try:
            link = self._connector.shortcut.connect(name)
        except OSError as error:
            self._shortcut_failed(error)
            return
        self._on_shortcut = True
        self._admit(link)

    def _shortcut_failed(self, error: Exception) -> None:
        """Back to the network."""
        self.no_shm = f"shared memory failed ({getattr(error, 'strerror', None) or error})"
        self._attempt()

    def failed(self, error: Exception) -> None:
        """The connection was not made, or was refused."""
        if self._over:
            return
        self.admission = None
        if self._on_shortcut and not isinstance(error, Refused):
            self._shortcut_failed(error)
        elif isinstance(error, Refused) and error.code == Refusal.DUPLICATE:
            self.trouble = "waiting for the connection that the other side opened"
            self._retry_later(self._connector.hub.config.handshake_timeout)
        elif isinstance(error, Refused) and error.code in _FINAL:
            self.trouble = error.reason or error.message
            self._give_up(error)
        else:
            self._attempt_failed(error)

    def _attempt_failed(self, error: Exception) -> None:
        self.trouble = (
            str(error.strerror or error) if isinstance(error, OSError) else str(getattr(error, "reason", "") or error)
        )
        self._next += 1
        if self._next < len(self._numeric):
            self._attempt()
        elif self.patient or not isinstance(error, ConnectionRefusedError):
            self._retry_later(self._backoff)
            self._backoff = min(2 * self._backoff, self._connector.hub.config.connect_backoff[1])
        else:
            self._give_up(error)

    def _retry_later(self, delay: float) -> None:
        now = monotonic()
        if now + delay >= self.deadline:
            self._connector.hub.engine.call_at(self.deadline, lambda: self._give_up(None))
        else:
            self._connector.hub.engine.call_at(now + delay, self._attempt)

    def _give_up(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        hint = (
            str(getattr(error, "hint", ""))
            or "Check that the process runs there and that the address can be reached (rankmesh doctor --reach)."
        )
        self._connector.dial_failed(
            self,
            ConnectError(
                f"{self.router.peer} cannot be reached at {self.where}: {self.trouble}.",
                address=self.where,
                reason=self.trouble,
                hint=hint,
            ),
        )


class Connector:
    """Makes and accepts the connections of one endpoint, which tells it who is known.

    known(uid): the router of a peer, if there is one. bind(identity, dialed): the router that a new connection
    belongs to. objection(identity): why a peer that proved itself is not wanted all the same, or nothing.
    """

    def __init__(
        self,
        hub: Hub,
        identity: Callable[[], Identity],
        known: Callable[[bytes], PeerRouter | None],
        bind: Callable[[Identity, PeerRouter | None], PeerRouter],
        objection: Callable[[Identity], str],
    ) -> None:
        self.hub = hub
        self._identity = identity
        self._known = known
        self._bind = bind
        self._objection = objection
        self._listeners: list[Listener] = []
        self._dials: dict[int, Dial] = {}
        self._accepting: dict[Admission, None] = {}
        #: Handshakes of our own attempts.
        self.dialing: dict[Admission, Dial] = {}
        self.shortcut = Shortcut(hub.config)
        self.refusals = Refusals(hub.engine)

    @property
    def place(self) -> str:
        return self.shortcut.place

    @property
    def shared_place(self) -> str:
        """The same where others can connect over shared memory; empty where they cannot."""
        return self.shortcut.place if self.shortcut.name else ""

    @property
    def no_shm(self) -> str:
        """Why this endpoint does not share memory; empty if it does."""
        return self.shortcut.trouble

    # ------------------------------------------------------------------ listening

    def listen(self, address: Address) -> Address:
        """Listen, and return the address with its port."""
        if not address.is_loopback and not self.hub.config.token:
            raise ConfigError(
                f"Listening on {address}, which others can reach, needs a cluster token. "
                "Set RANKMESH_TOKEN or Config(token=…) to the same secret everywhere, or listen on 127.0.0.1."
            )
        try:
            listener = transport_for(address).listen(address, self.hub.config)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {address}: {error.strerror or error}. Choose another address, or port 0 for a "
                "free one."
            ) from error
        self._accept_from(listener)
        beside = self.shortcut.listen(listener.address)
        if beside is not None:
            self._accept_from(beside)
        return listener.address

    def _accept_from(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self.hub.engine.watch(listener.fileno(), _IN, lambda mask: self._accept(listener))

    def _accept(self, listener: Listener) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                link = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning(
                    "Cannot accept a connection on %s: %s. Trying again shortly.",
                    listener.address,
                    error.strerror or error,
                )
                self.hub.engine.modify(listener.fileno(), 0)
                self.hub.engine.call_at(monotonic() + ACCEPT_PAUSE, lambda: self._listen_again(listener))
                return
            if len(self._accepting) >= self.hub.config.max_handshakes:
                self._make_room()
            self._accepting[self._new_admission(link, None, self.hub.config.handshake_timeout)] = None

    def _listen_again(self, listener: Listener) -> None:
        if listener in self._listeners:
            self.hub.engine.modify(listener.fileno(), _IN)

    def _make_room(self) -> None:
        """Strangers must not keep peers out: the oldest that has said nothing goes, or else the oldest."""
        oldest = next((admission for admission in self._accepting if not admission.spoke), next(iter(self._accepting)))
        self._refused(
            oldest, ConnectError("too many connections are in the handshake at once", reason="too many handshakes")
        )
        oldest.drop()

    # ------------------------------------------------------------------ dialing

    def dial(
        self, router: PeerRouter, addresses: list[Address], deadline: float, work: Work[Peer] | None = None
    ) -> None:
        """Begin to connect, unless that is under way. `work` is finished with the peer, or failed."""
        if router.index not in self._dials:
            dial = Dial(self, router, addresses, deadline, work)
            self._dials[router.index] = dial
            dial.start()

    def trouble(self, router: PeerRouter) -> str:
        """Why there is no connection yet."""
        dial = self._dials.get(router.index)
        return f"{dial.where}: {dial.trouble}" if dial is not None else ""

    def forget(self, router: PeerRouter) -> None:
        """Nobody wants a link for this router any more."""
        dial = self._dials.pop(router.index, None)
        if dial is not None:
            dial.cancel()

    def dial_failed(self, dial: Dial, error: ConnectError) -> None:
        self._dials.pop(dial.router.index, None)
        if dial.work is not None:
            dial.router.unreachable(error)
            dial.work.fail(error)
        elif dial.router.outbound.only_optional() and not self.hub.awaits(dial.router.index):
            dial.router.unreachable(error)
        else:
            dial.router.lose(f"it cannot be reached at {dial.where} ({dial.trouble})", left=dial.trouble == CLOSING)

    def admit(self, link: Link, dial: Dial, timeout: float) -> None:
        dial.admission = admission = self._new_admission(link, dial, timeout)
        self.dialing[admission] = dial
        admission.ready()

    # ------------------------------------------------------------------ handshakes

    def _new_admission(self, link: Link, dial: Dial | None, timeout: float) -> Admission:
        return Admission(
            self.hub.engine,
            link,
            initiator=dial is not None,
            token=self.hub.config.token,
            identity=self._identity_for(dial),
            shortcut=self.shortcut.name if dial is None and link.remote.startswith(_NETWORKED) else b"",
            timeout=timeout,
            progressed=self._progressed if dial is None else self._dial_progressed,
            failed=self._refused if dial is None else self._dial_refused,
        )

    def _identity_for(self, dial: Dial | None) -> Identity:
        identity = self._identity()
        return identity if dial is None or not dial.no_shm else replace(identity, no_shm=plain(dial.no_shm))

    def _progressed(self, admission: Admission) -> None:
        """An accepted connection went a step further."""
        if admission.handshake.undecided:
            self._judge(admission)
        elif admission.handshake.done:
            del self._accepting[admission]
            self._admitted(admission)

    def _judge(self, admission: Admission) -> None:
        remote = admission.handshake.remote
        assert remote is not None
        objection = self._objection(remote)
        dials = [dial for dial in self._dials.values() if dial.remote_uid == remote.uid]
        awaited = any(not dial.router.outbound.idle for dial in dials)  # what is still to be sent waits for it
        if objection and not (objection == CLOSING and awaited):
            admission.refuse(Refusal.WORLD, objection)
            return
        router = self._known(remote.uid)
        connected = router is not None and _is_connected(router)
        verdict = judge(self._identity().uid, remote.uid, connected=connected, dialing=bool(dials))
        match verdict:
            case Verdict.REFUSE:
                admission.refuse(Refusal.DUPLICATE, "both sides connected at once, and the other connection is kept")
            case Verdict.ACCEPT:
                if router is not None:
                    router.rest()  # if it still holds a connection that both sides agreed to let go
                admission.accept()

    def _dial_progressed(self, admission: Admission) -> None:
        """A connection of our own went a step further."""
        dial = self.dialing[admission]
        handshake = admission.handshake
        if handshake.done:
            del self.dialing[admission]
            self._dials.pop(dial.router.index, None)
            self._admitted(admission, dial)
            return
        if dial.remote_uid is None and handshake.remote_uid is not None:
            dial.remote_uid = handshake.remote_uid
            router = self._known(dial.remote_uid)
            if router is not None and _is_connected(router):
                self._settle(router)
                return
        if handshake.shortcut and not dial.no_shm:
            del self.dialing[admission]
            admission.drop(abort=False)
            dial.take_shortcut(handshake.shortcut)

    def _admitted(self, admission: Admission, dial: Dial | None = None) -> None:
        remote = admission.handshake.remote
        assert remote is not None
        link = admission.release()
        objection = self._objection(remote)
        if dial is not None and dial.router.peer.uid not in (None, remote.uid):
            objection = f"another process ({remote.name}, pid {remote.pid} on {remote.host}) answers at {dial.where}"
        leaving = objection == CLOSING  # the other side, where it is a peer already, is told so
        if objection and not leaving:
            link.abort()
            if dial is not None:
                self.dial_failed(
                    dial, ConnectError(f"{dial.router.peer}: {objection}.", reason=objection, address=dial.where)
                )
            return
        router = self._bind(remote, dial.router if dial is not None else None)
        if router.link is None:
            router.carrier = carrier(link, admission.handshake.identity, remote)
            router.attach(link, remote, monotonic())
        else:
            link.close()  # connect() to a peer that was connected already
        self._settle(router)
        if leaving and router.outbound.idle:  # else close() says goodbye when all is sent
            router.say_goodbye(CLOSED)
        if dial is not None:
            dial.reached(router.peer)

    def _settle(self, router: PeerRouter) -> None:
        """The peer is connected: attempts at it are over, and those who wait for them have it."""
        identity = router.peer.identity
        assert identity is not None
        for dial in [dial for dial in self._dials.values() if dial.router is router or dial.remote_uid == identity.uid]:
            del self._dials[dial.router.index]
            if dial.admission is not None:
                self.dialing.pop(dial.admission, None)
            dial.cancel()
            if dial.router is not router:
                self._bind(identity, dial.router)
            dial.reached(router.peer)

    def _refused(self, admission: Admission, error: Exception) -> None:
        """A connection from outside did not make it."""
        self._accepting.pop(admission, None)
        text = error.message if isinstance(error, RankmeshError) else getattr(error, "strerror", None) or str(error)
        uid = admission.handshake.remote_uid
        # Where both sides connect at once, one connection is refused or dropped: nobody needs to know.
        duplicate = isinstance(error, Refused) and error.code == Refusal.DUPLICATE
        # No stranger comes over shared memory: who hangs up there has changed its mind, or ended.
        known = uid is not None or admission.link.remote.startswith("shm://")
        dropped = isinstance(error, Closed | ConnectionError) and known
        if duplicate or dropped:
            logger.debug("Refused the connection from %s: %s.", admission.link.remote, text)
        else:
            self.refusals.add(admission.link.remote, text)

    def _dial_refused(self, admission: Admission, error: Exception) -> None:
        dial = self.dialing.pop(admission)
        dial.failed(error)

    # ------------------------------------------------------------------ the end

    def close(self) -> list[Work[Peer]]:
        """Stop listening and drop what has not come about yet; those who wait for it are returned."""
        for listener in self._listeners:
            self.hub.engine.unwatch(listener.fileno())
            listener.close()
        self._listeners.clear()
        waiting = [dial.work for dial in self._dials.values() if dial.work is not None]
        for dial in self._dials.values():
            dial.cancel()
        self._dials.clear()
        for admission in [*self._accepting, *self.dialing]:
            admission.drop()
        self._accepting.clear()
        self.dialing.clear()
        self.refusals.close()
        return waiting


def _is_connected(router: PeerRouter) -> bool:
    """It has a connection, and did not agree to let it go."""
    return router.link is not None and not router.outbound.paused
