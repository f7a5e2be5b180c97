"""Certificates made for a test."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Optional

import trustme


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

    def client(self, name: Optional[str] = None, authority: Optional[trustme.CA] = None) -> ssl.SSLContext:
        """A client's TLS context; with a client certificate for ``name`` if one is given."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if name is not None:
            (authority or self.authority).issue_cert(f"{name}@example.org", common_name=name).configure_cert(context)
        return context
