"""A certificate authority in a directory. Needs the extra `certs`.

    ca.pem        goes to every node              node0.pem      the certificate of node0
    ca-key.pem    signs; keep it off the nodes    node0-key.pem  its key, for node0 only

A node's certificate is good for either side of a connection. The CA is never replaced, because every certificate
depends on it. Keys are readable by their owner only, from the moment their files exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rankmesh.config import TlsFiles
from rankmesh.errors import ConfigError

#: Clocks of a cluster's hosts differ: a certificate is valid from a little before it was made.
CLOCK_SKEW: Final = timedelta(minutes=5)
#: The longest validity offered, and long enough to be no limit.
MAX_DAYS: Final = 36500

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def has_ca(directory: Path) -> bool:
    return _paths(directory, "ca")[0].exists()


def make_ca(directory: Path, *, days: int = 365) -> Path:
    """Make the CA; returns the path of its certificate. Raises ConfigError if there is one already."""
    directory.mkdir(parents=True, exist_ok=True)
    refuse_to_replace(directory, ["ca"])
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("rankmesh cluster CA")
    certificate = (
        _certificate(subject, key, days)
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory, "ca", certificate, key)
    return _paths(directory, "ca")[0]


def make_node(directory: Path, name: str, *, days: int = 365, force: bool = False) -> TlsFiles:
    """Make a certificate that the directory's CA signs. Replaces an existing one only with `force`."""
    if not _NODE_NAME.fullmatch(name) or name == "ca" or name.endswith("-key"):
        raise ConfigError(
            f"{name!r} cannot name a node. Use up to 63 letters, digits, '-' and '.'; 'ca' and '…-key' are taken."
        )
    if not force:
        refuse_to_replace(directory, [name])
    ca, ca_key = _load_ca(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _certificate(_subject(name), key, days)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write(directory, name, certificate, key)
    cert_path, key_path = _paths(directory, name)
    return TlsFiles(cert=str(cert_path), key=str(key_path), ca=str(_paths(directory, "ca")[0]))


def refuse_to_replace(directory: Path, names: Iterable[str]) -> None:
    for path in (path for name in names for path in _paths(directory, name)):
        if path.exists():
            raise ConfigError(
                f"{path} exists. Pass --force to replace a node's files; for another CA use another directory."
            )


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}-key.pem"


def _load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert_path, key_path = _paths(directory, "ca")
    try:
        certificate = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The CA in {directory} cannot be read: {error}. Run this where ca.pem and ca-key.pem are."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_path} is not an elliptic-curve key. Use a CA that `rankmesh certs` made.")
    return certificate, key


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    if not 0 < days <= MAX_DAYS:
        raise ConfigError(f"Certificates cannot be valid for {days} days. Use 1 to {MAX_DAYS}.")
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    cert_path, key_path = _paths(directory, name)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # The key first: a certificate whose key is missing is worse than the reverse.
    _replace(key_path, secret, mode=0o600)
    _replace(cert_path, certificate.public_bytes(pem), mode=0o644)


def _replace(path: Path, content: bytes, *, mode: int) -> None:
    """Whole or not at all, and never readable by more people than in the end."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
