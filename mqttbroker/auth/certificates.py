"""Authentication by the certificate that a client showed in its TLS handshake."""

from __future__ import annotations

from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD
from mqttbroker.core.access.policy import AuthenticationRequest, Authenticator, Identity
from mqttbroker.core.terms.certificate_names import certificate_name


class CertificateAuthenticator(Authenticator):
    """Accepts clients with a certificate as the user that is its first name of these kinds."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__("certificate", False)
        self._kinds = kinds

    def authenticate(self, request: AuthenticationRequest) -> None:
        certificate = None if request.method is not None else request.certificate
        if not certificate:
            request.ignore()
            return
        name = certificate_name(certificate, self._kinds)
        if name is None:
            request.reject(BAD_USER_NAME_OR_PASSWORD, f"certificate without a usable {' or '.join(self._kinds)}")
        else:
            request.accept(Identity(name))
