"""Authentication by the certificate that a client showed in its TLS handshake."""

from __future__ import annotations

from typing import Any, Optional

from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD
from mqttbroker.core.policy import AuthenticationRequest, Authenticator, Identity


class CertificateAuthenticator(Authenticator):
    """Accepts clients with a certificate as the user that is its common name."""

    def __init__(self) -> None:
        super().__init__("certificate", False)

    def authenticate(self, request: AuthenticationRequest) -> None:
        certificate = None if request.method is not None else request.certificate
        if not certificate:
            request.ignore()
            return
        name = common_name(certificate)
        if name is None:
            request.reject(BAD_USER_NAME_OR_PASSWORD, "certificate without a common name")
        else:
            request.accept(Identity(name))


def common_name(certificate: Any) -> Optional[str]:
    """The subject's common name in a certificate from `ssl.SSLSocket.getpeercert`; the last one if there are
    several."""
    found: Optional[str] = None
    for relative_name in certificate.get("subject", ()):
        for key, value in relative_name:
            if key == "commonName" and value:
                found = value
    return found
