"""Every transport passes the one suite, also when reads and writes are cut short at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rankmesh.config import MIB, Config, TlsFiles
from rankmesh.testing.conformance import LinkConformance
from rankmesh.testing.faults import FaultTransport
from rankmesh.transport import Address, transport_for
from timing import scaled


class TestInproc(LinkConformance):
    address = "inproc://"
    timeout = scaled(10)


class TestShm(LinkConformance):
    address = "shm://"
    timeout = scaled(10)


class TestTcpIpv4(LinkConformance):
    address = "tcp://127.0.0.1:0"
    timeout = scaled(10)


class TestTcpIpv6(LinkConformance):
    address = "tcp://[::1]:0"
    timeout = scaled(10)


class TestTls(LinkConformance):
    address = "tls://127.0.0.1:0"
    timeout = scaled(10)

    @pytest.fixture(autouse=True)
    def _certificates(self, node: TlsFiles) -> None:
        self.config = Config(tls=node)


class _Trickling(LinkConformance):
    """The wrapper keeps every promise of the transport in it, and shows that the suite itself takes short calls."""

    address = ""
    inner = ""
    timeout = scaled(30)
    bulk_bytes = 2 * MIB

    @pytest.fixture(autouse=True)
    def _wrapped(self) -> Iterator[None]:
        inner = Address.parse(self.inner)
        seed = random.SystemRandom().randrange(2**32)
        faults = FaultTransport(transport_for(inner), seed=seed, prepare=lambda link: link.trickle(5000))
        with faults.installed():
            yield


class TestTricklingShm(_Trickling):
    inner, address = "shm://", "fault+shm://"


class TestTricklingInproc(_Trickling):
    inner, address = "inproc://", "fault+inproc://"


class TestTricklingTcp(_Trickling):
    inner, address = "tcp://127.0.0.1:0", "fault+tcp://127.0.0.1:0"


class TestTricklingTls(_Trickling):
    inner, address = "tls://127.0.0.1:0", "fault+tls://127.0.0.1:0"

    @pytest.fixture(autouse=True)
    def _certificates(self, node: TlsFiles) -> None:
        self.config = Config(tls=node)
