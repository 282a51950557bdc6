"""What a pair of endpoints is carried by: every message test runs over every transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peers import FAULTY, Medium, Pair, faulty, open_pair
from rankmesh import Config, TlsFiles
from rankmesh.cli import authority
from rankmesh.testing.faults import FaultTransport

#: Address to listen on by transport: a new one is tested by a line here.
TRANSPORTS = {"inproc": "inproc://", "shm": "shm://", "tcp": "tcp://127.0.0.1:0", "tls": "tls://127.0.0.1:0"}
#: Reads and writes of at most this many bytes, by chance: frames are cut everywhere.
TRICKLE_BYTES = 9000


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    directory = tmp_path_factory.mktemp("certificates")
    authority.make_ca(directory)
    return authority.make_node(directory, "node")


@pytest.fixture
def faults() -> Iterator[FaultTransport]:
    """Carries FAULTY as long as the test runs; its links can be stalled, cut and so on."""
    with faulty() as transport:
        yield transport


@pytest.fixture(params=[*TRANSPORTS, "trickle"])
def medium(request: pytest.FixtureRequest) -> Iterator[Medium]:
    if request.param == "trickle":
        with faulty(lambda link: link.trickle(TRICKLE_BYTES)):
            yield FAULTY
    else:
        tls = request.getfixturevalue("certificates") if request.param == "tls" else None
        yield Medium(TRANSPORTS[request.param], Config(tls=tls, shm=False))


@pytest.fixture
def pair(medium: Medium) -> Iterator[Pair]:
    with open_pair(medium) as both:
        yield both


@pytest.fixture
def inproc() -> Medium:
    """For what does not depend on the transport."""
    return Medium("inproc://", Config())


@pytest.fixture
def tcp() -> Medium:
    """For what needs a real socket, or another process."""
    return Medium("tcp://127.0.0.1:0", Config(shm=False))
