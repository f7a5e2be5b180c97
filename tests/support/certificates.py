"""Certificates made for a test."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization


class CertificateFiles:
    """A certificate authority, and the PEM files of a server in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.directory = directory
        self.cafile = directory / "ca.pem"
        self.certfile = directory / "server.pem"
        self.keyfile = directory / "server.key"
        self.authority.cert_pem.write_to_path(str(self.cafile))
        self.new_server_certificate()

    def new_server_certificate(self) -> None:
        certificate = self.authority.issue_cert("localhost", "127.0.0.1")
        self.certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(str(self.keyfile))

    def config(self, kind: str = "tls", **more: Any) -> dict[str, Any]:
        """A plain listener, and one with TLS and client certificates signed by this authority."""
        files = {"certfile": str(self.certfile), "keyfile": str(self.keyfile), "cafile": str(self.cafile)}
        return {"listeners": [{"host": "127.0.0.1"}, {"type": kind, "port": 0, **files, **more}]}

    def client(self, name: str | None = None, authority: trustme.CA | None = None) -> ssl.SSLContext:
        """A client's TLS context; with a client certificate for ``name`` if one is given."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if name is not None:
            (authority or self.authority).issue_cert(f"{name}@example.org", common_name=name).configure_cert(context)
        return context

    def client_with(self, certificate: trustme.LeafCert) -> ssl.SSLContext:
        """A client's TLS context with this certificate."""
        context = self.client()
        certificate.configure_cert(context)
        return context


def revocation_list(
    authority: trustme.CA,
    *revoked: trustme.LeafCert | trustme.CA,
    lasts: timedelta = timedelta(days=1),
    signed_by: trustme.CA | None = None,
) -> bytes:
    """An authority's list, in PEM, which expires after ``lasts``; by default the authority has signed it."""
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    key: Any = serialization.load_pem_private_key((signed_by or authority).private_key_pem.bytes(), None)
    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer.subject)
    builder = builder.last_update(min(now, now + lasts) - timedelta(hours=1)).next_update(now + lasts)
    for certificate in revoked:
        pem = certificate.cert_pem if isinstance(certificate, trustme.CA) else certificate.cert_chain_pems[0]
        serial = x509.load_pem_x509_certificate(pem.bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
