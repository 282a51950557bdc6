"""Certificates for the tests of tls://, made once: a cluster, and a foreign one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh.cli import authority
from rankmesh.config import TlsFiles

pytest.register_assert_rewrite("rankmesh.testing.conformance")


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a CA with the nodes `node0` and `node1`."""
    directory = tmp_path_factory.mktemp("pki")
    authority.make_ca(directory)
    for name in ("node0", "node1"):
        authority.make_node(directory, name)
    return directory


@pytest.fixture(scope="session")
def node(pki: Path) -> TlsFiles:
    return TlsFiles(cert=str(pki / "node0.pem"), key=str(pki / "node0-key.pem"), ca=str(pki / "ca.pem"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A node of another cluster."""
    directory = tmp_path_factory.mktemp("foreign")
    authority.make_ca(directory)
    return authority.make_node(directory, "stranger")
