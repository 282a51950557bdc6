"""Large results are let go when their last user is, so that their memory serves the next call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from peers import SOON
from rankmesh import Config, Endpoint
from rankmesh.config import MIB
from timing import wait_until


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("address", ["shm://", "tcp://127.0.0.1:0"])
def test_a_result_is_gone_with_its_last_reference(address: str, no_collector: None) -> None:
    """Found: a call and the send that carried it referred to each other, and every result cost fresh pages."""
    config = Config(shm=address.startswith("shm"))
    with Endpoint(address, config=config) as server, Endpoint(None, config=config) as client:
        server.rpc.register(lambda array: array, "echo")
        peer = client.connect(server.address, timeout=SOON)
        held = []
        for number in range(8):
            result = peer.call("echo", np.full(2 * MIB, number, np.uint8), timeout=SOON)
            assert result[0] == result[-1] == number
            held.append(weakref.ref(result.base))
            del result
        wait_until(lambda: all(reference() is None for reference in held), 5)  # another thread may be about to let go
        assert client.hub.large_pool.held <= 2 * 4 * MIB, "the buffers of the size class are used again"
