"""rankmesh: tagged messages between the ranks of a program, over TCP, TLS or in one process, behind one small API."""

from rankmesh.config import Config, TlsFiles
from rankmesh.endpoint import ANY_SOURCE, ANY_TAG, Endpoint, Peer, Status, Work
from rankmesh.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    CodecError,
    ConfigError,
    ConnectError,
    DeadlineError,
    DesyncError,
    EpochChanged,
    InternalError,
    JoinError,
    PeerError,
    PeerLost,
    ProtocolError,
    RankmeshError,
    RemoteError,
    TransferAborted,
    TruncationError,
    UsageError,
)
from rankmesh.mesh import Mesh, join

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BusyError",
    "CancelledError",
    "ClosedError",
    "CodecError",
    "Config",
    "ConfigError",
    "ConnectError",
    "DeadlineError",
    "DesyncError",
    "Endpoint",
    "EpochChanged",
    "InternalError",
    "JoinError",
    "Mesh",
    "Peer",
    "PeerError",
    "PeerLost",
    "ProtocolError",
    "RankmeshError",
    "RemoteError",
    "Status",
    "TlsFiles",
    "TransferAborted",
    "TruncationError",
    "UsageError",
    "Work",
    "__version__",
    "join",
]
