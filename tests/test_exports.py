"""The public surface, name by name: a change here is a change of what users may rely on."""

from __future__ import annotations

import importlib.metadata
import inspect
import types

import rankmesh
from rankmesh import errors

PUBLIC = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AccessDenied",
    "BusyError",
    "CancelledError",
    "Channel",
    "ClosedError",
    "CodecError",
    "Config",
    "ConfigError",
    "ConnectError",
    "DeadlineError",
    "DesyncError",
    "Endpoint",
    "EpochChanged",
    "FunctionNotFound",
    "Group",
    "Hook",
    "InternalError",
    "InvalidMessage",
    "JoinError",
    "MemoryAgent",
    "Mesh",
    "NoConnection",
    "Notification",
    "OutOfBounds",
    "Peer",
    "PeerError",
    "PeerLost",
    "ProtocolError",
    "RankmeshError",
    "Ref",
    "Region",
    "RegionError",
    "RegionEvent",
    "RegionInfo",
    "RegionNotFound",
    "RegionWatch",
    "RemoteError",
    "RemoteRegion",
    "RpcAgent",
    "StaleRegion",
    "Status",
    "Stream",
    "TlsFiles",
    "TransferAborted",
    "TruncationError",
    "UsageError",
    "Work",
    "__version__",
    "current_call",
    "join",
    "trace_context",
]


def test_public_names_are_exactly_these() -> None:
    assert sorted(rankmesh.__all__) == PUBLIC


def test_every_public_name_is_there() -> None:
    assert [name for name in PUBLIC if not hasattr(rankmesh, name)] == []


def test_nothing_else_looks_public() -> None:
    """Submodules become attributes once somebody imports them; any other name must be listed or begin with _."""
    others = {
        name
        for name, value in vars(rankmesh).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in PUBLIC
    }
    assert others - {"annotations"} == set()


def test_every_error_is_public() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert kinds <= set(PUBLIC)
    assert all(getattr(rankmesh, name) is getattr(errors, name) for name in kinds)


def test_public_classes_and_functions_say_what_a_caller_must_know() -> None:
    documented = [value for name in PUBLIC if callable(value := getattr(rankmesh, name))]
    assert [value for value in documented if not (value.__doc__ or "").strip()] == []


def test_version_is_the_installed_one() -> None:
    assert rankmesh.__version__ == importlib.metadata.version("rankmesh")
