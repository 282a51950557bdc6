"""All settings, in one frozen and validated dataclass."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rankmesh.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

ENV_PREFIX = "RANKMESH_"
ALGORITHM_PREFIX = ENV_PREFIX + "ALGORITHM_"
#: Fields that count something of which there must be one.
_COUNTS = (
    "max_message_bytes",
    "max_rpc_bytes",
    "send_queue_bytes",
    "rpc_inflight_bytes",
    "rpc_send_bytes",
    "rpc_threads",
    "rpc_queue_items",
    "rpc_queue_bytes",
    "memory_queue_bytes",
    "rails",
    "max_handshakes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a node: its certificate and key, and the CA that signs every node's certificate."""

    cert: str
    key: str
    ca: str

    def __post_init__(self) -> None:
        for what in ("cert", "key", "ca"):
            path = getattr(self, what)
            if not os.path.isfile(path):
                raise ConfigError(f"TLS {what} file {path!r} does not exist. `rankmesh certs` makes a set.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of an Endpoint or a Mesh. Explicit arguments beat `Config`; the environment counts only via
    `from_env()`."""

    #: Shared secret of the cluster; required off loopback. Never shown by `repr`.
    token: str = ""
    #: Certificates for tls:// addresses.
    tls: TlsFiles | None = None

    #: Seconds a call waits when it is not given `timeout=`.
    timeout: float = 30.0
    #: Seconds within which a new connection must have proved itself.
    handshake_timeout: float = 5.0
    #: Seconds between attempts to connect: the first, then doubled up to the last.
    connect_backoff: tuple[float, float] = (0.02, 1.0)
    #: Seconds `close()` waits for queued data to leave and for the other side to say goodbye.
    close_timeout: float = 5.0
    #: A connection without traffic is closed after this many seconds, and made again when needed.
    idle_timeout: float = 300.0
    #: A peer that nothing was sent to for this long gets a heartbeat.
    heartbeat_interval: float = 1.0
    #: A peer that nothing was heard of for this long is lost.
    heartbeat_timeout: float = 5.0

    #: Largest message, checked before anything is allocated.
    max_message_bytes: int = 4 * GIB
    #: Largest RPC request or reply.
    max_rpc_bytes: int = 1 * GIB
    #: Messages up to this size travel at once; larger ones wait for the receive to be posted.
    eager_bytes: int = 64 * KIB
    #: Unreceived bytes one (group, tag) of one sender may have here before that lane waits.
    lane_credit_bytes: int = 1 * MIB
    #: Unreceived bytes one sender may have here in all its lanes.
    peer_credit_bytes: int = 16 * MIB
    #: Bookkeeping bytes of sends waiting for their turn, for one peer; more raises BusyError.
    send_queue_bytes: int = 64 * MIB
    #: Bytes of large RPC requests and replies being received at once; and of memory that is kept for the next ones, and
    #: for collectives.
    rpc_inflight_bytes: int = 256 * MIB
    #: Bytes of RPC requests and replies that may wait to leave for one peer; more raises BusyError.
    rpc_send_bytes: int = 256 * MIB
    #: Threads that run RPC handlers, at most; they are started when needed.
    rpc_threads: int = 8
    #: Requests that may wait for a handler here, or run: in number and in bytes. More are refused or wait.
    rpc_queue_items: int = 16_384
    rpc_queue_bytes: int = 64 * MIB
    #: What a caller gets when that queue is full: "busy" raises BusyError there at once, "wait" lets it try again
    #: until its deadline.
    rpc_when_full: str = "busy"
    #: Bookkeeping bytes of one peer's large reads and writes under way in this side's regions; more are refused with
    #: BusyError.
    memory_queue_bytes: int = 64 * MIB
    #: Connections that reads and writes of 4 MiB and more are striped over. More than one pays where a network gives a
    #: single stream less than it can carry; on loopback, where the processors are the limit, it costs.
    rails: int = 1
    #: Connections that may be in the handshake at once; the oldest silent one makes room.
    max_handshakes: int = 128

    #: Seconds a waiter polls before it sleeps, as long as polling lately paid off. 0 never polls.
    spin: float = 100e-6

    #: Peers of the same host and user move from sockets to shared memory by themselves.
    shm: bool = True
    #: Inside one host, large arrays of collectives and registered memory are read where they lie, where the system lets
    #: processes read each other's memory.
    pull: bool = True

    #: Algorithms of collectives, where a call names none: "all_reduce=ring, broadcast=binomial". The same on all ranks.
    algorithms: str = ""
    #: A table of algorithms that `rankmesh bench collectives --tune` has written, for what `algorithms` leaves open. It
    #: says the same on all ranks.
    collective_table: str = ""

    #: Interfaces to advertise: names, globs, `^exclude` or CIDR, separated by commas. Empty: by route.
    interface: str = ""
    #: Pickle may be used for objects msgpack cannot carry, if the other side agrees too.
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout", "handshake_timeout", "close_timeout", "idle_timeout", "heartbeat_interval"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Config.{name} must be a positive number of seconds, not {getattr(self, name)!r}.")
        if not self.heartbeat_timeout >= 2 * self.heartbeat_interval:  # also refuses nan
            raise ConfigError(
                f"Config.heartbeat_timeout ({self.heartbeat_timeout} s) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval} s), or a healthy peer counts as lost."
            )
        if not 0 <= self.spin <= 0.01:
            raise ConfigError(f"Config.spin must be between 0 and 0.01 seconds, not {self.spin!r}.")
        first, last = self.connect_backoff
        if not 0 < first <= last:
            raise ConfigError(
                f"Config.connect_backoff must be (first, last) with 0 < first <= last, not {self.connect_backoff!r}."
            )
        if not 0 < self.eager_bytes <= (self.lane_credit_bytes - KIB) // 2:
            raise ConfigError(
                f"Config.lane_credit_bytes ({self.lane_credit_bytes}) must hold two messages of eager_bytes "
                f"({self.eager_bytes}) and 1 KiB. Raise the first or lower the second."
            )
        if self.lane_credit_bytes > self.peer_credit_bytes:
            raise ConfigError("Config.lane_credit_bytes must not exceed peer_credit_bytes.")
        if self.rpc_when_full not in ("busy", "wait"):
            raise ConfigError(f"Config.rpc_when_full must be 'busy' or 'wait', not {self.rpc_when_full!r}.")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"Config.{name} must be at least 1, not {getattr(self, name)!r}.")

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "token" and getattr(self, f.name) != f.default
        )
        secret = ["token=…"] if self.token else []
        return f"Config({', '.join([*secret, *shown])})"

    def override(self, **changes: Any) -> Self:
        """A copy with the given fields changed; None leaves a field as it is."""
        given = {name: value for name, value in changes.items() if value is not None}
        unknown = given.keys() - {f.name for f in fields(self)}
        if unknown:
            raise ConfigError(f"Config has no field {', '.join(sorted(unknown))}. See rankmesh.Config for the list.")
        return replace(self, **given)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read RANKMESH_TOKEN, RANKMESH_TIMEOUT … (a variable per field; TLS by RANKMESH_TLS_CERT, _KEY and _CA). An
        algorithm has a variable by itself too: RANKMESH_ALGORITHM_ALL_REDUCE=ring."""
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = env.get(ENV_PREFIX + field.name.upper())
            if text is not None and field.name not in ("tls", "connect_backoff"):
                values[field.name] = _parse(field.name, text, type(field.default))
        named = [
            f"{name.removeprefix(ALGORITHM_PREFIX).lower()}={text}"
            for name, text in sorted(env.items())
            if name.startswith(ALGORITHM_PREFIX) and text
        ]
        if named:  # behind those of RANKMESH_ALGORITHMS: the last of a collective counts
            values["algorithms"] = ",".join(filter(None, (values.get("algorithms"), *named)))
        files = {part: env.get(f"{ENV_PREFIX}TLS_{part.upper()}") for part in ("cert", "key", "ca")}
        if any(files.values()):
            missing = [f"{ENV_PREFIX}TLS_{part.upper()}" for part, path in files.items() if not path]
            if missing:
                raise ConfigError(f"TLS needs all of cert, key and ca: set {', '.join(missing)} too.")
            values["tls"] = TlsFiles(**{part: str(path) for part, path in files.items()})
        return cls(**values)


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{ENV_PREFIX}{name.upper()} must be 0 or 1, not {text!r}.")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{ENV_PREFIX}{name.upper()} must be a {kind.__name__}, not {text!r}.") from error
