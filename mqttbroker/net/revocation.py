"""Certificate revocation lists: the contents of a ``crlfile`` (RFC 5280, section 5).

OpenSSL checks them in each handshake. The broker reads them as well, to report problems of the file and when its
lists expire, and to find the connected clients whose certificates a new list revokes.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from mqttbroker.net.verified_chain import verified_chain

_PEM = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


class RevocationLists:
    """The lists of one file. Raises OSError, with the file's name, if one is invalid.

    ``authorities`` are those of the listener. A list of one of them must have its signature; another one may belong to
    an intermediate authority whose certificate the clients send.
    """

    def __init__(self, path: Path, authorities: Sequence[x509.Certificate]) -> None:
        self._path = path
        self._newest: dict[bytes, x509.CertificateRevocationList] = {}  # by the issuer's name in DER
        for found in _read(path):
            issuer = found.issuer.public_bytes()
            self._check_signature(found, [one for one in authorities if one.subject == found.issuer])
            newest = self._newest.get(issuer)
            if newest is None or found.last_update_utc >= newest.last_update_utc:
                self._newest[issuer] = found
        roots = [one for one in authorities if one.subject == one.issuer]
        # Whether certificates of authorities are checked, too, and not only those of clients.
        self.whole_chain = bool(roots) and all(root.subject.public_bytes() in self._newest for root in roots)
        expiries = [one.next_update_utc for one in self._newest.values() if one.next_update_utc is not None]
        self.expires: datetime | None = min(expiries, default=None)
        self.starts: datetime = max(one.last_update_utc for one in self._newest.values())

    def problem(self, now: datetime) -> str | None:
        """Why no client certificate is accepted now, None if they are."""
        if self.starts > now:
            return f"crlfile {self._path}: not valid before {self.starts:%Y-%m-%dT%H:%M:%SZ}"
        if self.expires is not None and self.expires <= now:
            return f"crlfile {self._path}: expired at {self.expires:%Y-%m-%dT%H:%M:%SZ}"
        return None

    def revoked(self) -> RevokedCertificates:
        return RevokedCertificates(
            {issuer: frozenset(entry.serial_number for entry in one) for issuer, one in self._newest.items()},
            self.whole_chain,
        )

    def _check_signature(self, found: x509.CertificateRevocationList, issuers: list[x509.Certificate]) -> None:
        if issuers and not any(_has_signed(issuer, found) for issuer in issuers):
            raise OSError(f"crlfile {self._path}: the list of {_name(found.issuer)} is not signed by that authority")


class RevokedCertificates:
    """Serial numbers of revoked certificates, by the name of their issuer in DER."""

    def __init__(self, serials: dict[bytes, frozenset[int]], whole_chain: bool) -> None:
        self._serials = serials
        self._whole_chain = whole_chain

    def include(self, ssl_object: Any) -> bool:
        """Whether the client's certificate is revoked, or may have been issued by a revoked authority."""
        chain = verified_chain(ssl_object)
        if chain:
            checked = chain if self._whole_chain else chain[:1]
            return any(self._includes(certificate) for certificate in checked)
        certificate = ssl_object.getpeercert(True)
        if certificate is None:
            return False
        return self._whole_chain or self._includes(certificate)

    def _includes(self, certificate: bytes) -> bool:
        found = x509.load_der_x509_certificate(certificate)
        return found.serial_number in self._serials.get(found.issuer.public_bytes(), frozenset())


def authorities_of(context: ssl.SSLContext) -> list[x509.Certificate]:
    """The authorities that a context trusts, without those that only OpenSSL can read."""
    found = []
    for data in context.get_ca_certs(binary_form=True):
        try:
            found.append(x509.load_der_x509_certificate(data))
        except ValueError:
            continue
    return found


def _read(path: Path) -> list[x509.CertificateRevocationList]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(f"crlfile {path}: {error.strerror}") from None
    blocks = _PEM.findall(data)
    if not blocks:
        raise OSError(f"crlfile {path}: not PEM, or no revocation list in it")
    found = []
    for number, block in enumerate(blocks, 1):
        try:
            found.append(x509.load_pem_x509_crl(block))
        except ValueError:
            raise OSError(f"crlfile {path}: list {number} is damaged") from None
    return found


def _has_signed(issuer: x509.Certificate, found: x509.CertificateRevocationList) -> bool:
    key: Any = issuer.public_key()
    try:
        return found.is_signature_valid(key)
    except (InvalidSignature, TypeError, ValueError):
        return False


def _name(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(common[0].value) if common else name.rfc4514_string()
