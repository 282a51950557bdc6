"""Functions and objects by pickle: only where both sides allow it, and prove who they are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from calls import serving
from peers import SOON, Medium
from rankmesh import CodecError, ConfigError, Endpoint, RemoteError, UsageError


def test_function_runs_there(tcp: Medium) -> None:
    with serving(tcp, allow_pickle=True, token="secret") as served:
        offset = 5
        rpc = served.client.rpc
        assert rpc.call_fn(served.peer, lambda a, b=1: a * b + offset, 2, b=3, timeout=SOON) == 11
        assert rpc.call_fn(served.peer, np.sum, np.arange(10), timeout=SOON) == 45
        with pytest.raises(ZeroDivisionError):
            rpc.call_fn(served.peer, lambda: 1 // 0, timeout=SOON)


def test_objects_travel_by_pickle_where_both_allow_it(tcp: Medium) -> None:
    with serving(tcp, allow_pickle=True, token="secret") as served:
        assert served.peer.call("pooled", 1 + 2j, timeout=SOON) == 1 + 2j
        error = served.peer.call("pooled", ValueError("an object"), timeout=SOON)
        assert isinstance(error, ValueError)
        assert error.args == ("an object",)


def test_function_is_not_sent_where_this_side_does_not_allow_it(tcp: Medium) -> None:
    with serving(tcp, {"allow_pickle": True}, token="secret") as served:
        with pytest.raises(UsageError, match="allow_pickle"):
            served.client.rpc.call_fn(served.peer, len, "abc")
        with pytest.raises(CodecError, match="cannot travel"):
            served.peer.call("pooled", ValueError())


def test_function_is_not_sent_where_the_other_side_does_not_allow_it(tcp: Medium) -> None:
    with serving(tcp, {"allow_pickle": False}, token="secret", allow_pickle=True) as served:
        with pytest.raises(UsageError, match="does not take pickled functions"):
            served.client.rpc.call_fn(served.peer, len, "abc")
        with pytest.raises(CodecError, match="cannot travel"):
            served.peer.call("pooled", ValueError(), timeout=SOON)


def test_pickle_that_comes_all_the_same_is_refused(tcp: Medium) -> None:
    """A caller that pretends not to know."""
    with serving(tcp, {"allow_pickle": False}, token="secret", allow_pickle=True) as served:
        identity = served.peer.identity
        assert identity is not None
        served.peer.identity = msgspec.structs.replace(identity, allow_pickle=True)
        with pytest.raises(RemoteError, match="allow_pickle"):
            served.client.rpc.call_fn(served.peer, len, "abc", timeout=SOON)
        with pytest.raises(ValueError, match="pickle is not allowed"):
            served.peer.call("pooled", ValueError(), timeout=SOON)


def test_pickle_needs_proof(tcp: Medium) -> None:
    with pytest.raises(ConfigError, match="prove who they are"):
        Endpoint(tcp.address, allow_pickle=True)
