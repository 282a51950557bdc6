"""`rankmesh certs`, by the command line."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import pytest
from cryptography import x509

import rankmesh.cli
from rankmesh.cli import authority
from rankmesh.cli.main import main
from rankmesh.config import Config, TlsFiles
from rankmesh.errors import ConfigError
from rankmesh.testing.pump import connect_pair, transfer
from rankmesh.transport import Address
from rankmesh.transport.tls import TlsTransport
from timing import scaled


def files(directory: Path, name: str) -> TlsFiles:
    return TlsFiles(
        cert=str(directory / f"{name}.pem"), key=str(directory / f"{name}-key.pem"), ca=str(directory / "ca.pem")
    )


def test_the_command_makes_what_tls_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "deep" / "pki"
    assert main(["certs", str(directory), "--name", "node0", "--name", "node1.rack2", "--days", "30"]) == 0
    made = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert made == {
        "ca.pem": 0o644,
        "ca-key.pem": 0o600,
        "node0.pem": 0o644,
        "node0-key.pem": 0o600,
        "node1.rack2.pem": 0o644,
        "node1.rack2-key.pem": 0o600,
    }
    printed = capsys.readouterr().out
    assert all(str(directory / name) in printed for name in made if name != "ca-key.pem")
    listener = TlsTransport().listen(Address.parse("tls://127.0.0.1:0"), Config(tls=files(directory, "node0")))
    near, far = connect_pair(
        TlsTransport(), listener.address, Config(tls=files(directory, "node1.rack2")), scaled(10), listener
    )
    assert transfer(near, far, b"hello", scaled(10)) == b"hello"
    for thing in (near, far, listener):
        thing.close()


def test_certificates_pass_the_strict_checks_and_last_as_asked(tmp_path: Path) -> None:
    authority.make_ca(tmp_path, days=400)
    node = authority.make_node(tmp_path, "node0", days=30)
    certificate = x509.load_pem_x509_certificate(Path(node.cert).read_bytes())
    assert certificate.subject.rfc4514_string() == "CN=node0"
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lasts.days == 30
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(node.ca)
    assert context.cert_store_stats()["x509_ca"] == 1


def test_nodes_are_added_later_with_the_same_ca(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["ca-key.pem", "ca.pem", "node0-key.pem", "node0.pem"]
    assert main(["certs", str(tmp_path), "--name", "node7"]) == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    assert set(after) - set(before) == {"node7.pem", "node7-key.pem"}


def test_nothing_is_replaced_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["certs", str(tmp_path), "--name", "node1", "--name", "node0"]) == 2
    assert "node0.pem exists. Pass --force" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before, "not even node1 was made"
    with pytest.raises(ConfigError, match=r"ca\.pem exists"):
        authority.make_ca(tmp_path)
    assert main(["certs", str(tmp_path), "--force"]) == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"node0.pem", "node0-key.pem"}, "the CA is never replaced"
    assert (tmp_path / "node0-key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", "ca", "node-key", "../node", "a b", "-x", "x" * 64])
def test_names_that_would_be_trouble_are_refused(tmp_path: Path, name: str) -> None:
    authority.make_ca(tmp_path)
    with pytest.raises(ConfigError, match="cannot name a node"):
        authority.make_node(tmp_path, name)


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_impossible_validity_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match="Use 1 to 36500"):
        authority.make_ca(tmp_path, days=days)
    assert list(tmp_path.iterdir()) == []


def test_a_ca_without_its_key_cannot_sign(tmp_path: Path) -> None:
    authority.make_ca(tmp_path)
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca-key\.pem"):
        authority.make_node(tmp_path, "node0")


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(rankmesh.cli, "authority", raising=False)
    monkeypatch.delitem(sys.modules, "rankmesh.cli.authority", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(["certs", str(tmp_path)]) == 2
    assert "pip install 'rankmesh[certs]'" in capsys.readouterr().err
