"""SSL contexts from the files of a listener or of the HTTP server.

Each call reads all files into a new context, so that nothing of the old ones remains after a reload. An error is one
line that names the file.
"""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqttbroker.config.settings import Http, Listener
from mqttbroker.net.tls_alert import AlertContext

if TYPE_CHECKING:
    from mqttbroker.net.revocation import RevocationLists

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_MODES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_ALPN = {"tls": "mqtt", "wss": "http/1.1"}


class ListenerContext(AlertContext):
    """The context of a listener or of the HTTP server; ``revocations`` None = no ``crlfile``.

    ``certificate_expires`` is when the first certificate of ``certfile`` expires; None = unknown.
    """

    revocations: RevocationLists | None = None
    certificate_expires: datetime | None = None

    def refusal(self, ssl_object: Any, now: datetime) -> str | None:
        """Why a connection is refused although its handshake succeeded, None if it is not.

        OpenSSL verifies no certificate if the client resumes an earlier session.
        """
        certificate = ssl_object.getpeercert() if ssl_object.session_reused else None
        if not certificate:
            return None
        if ssl.cert_time_to_seconds(certificate["notAfter"]) < now.timestamp():
            return "certificate has expired"
        return None if self.revocations is None else self.revocations.problem(now)


class FileProblem(OSError):
    """A file that the settings name cannot be used; the text has the key, the file and the reason."""


def server_context(listener: Listener) -> ListenerContext | None:
    """The context of a listener, None without TLS.  Raises FileProblem."""
    if listener.type not in _ALPN:
        return None
    assert listener.certfile is not None and listener.keyfile is not None
    context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
    _prepare(context, listener.certfile, listener.keyfile, listener.tls_version, _ALPN[listener.type])
    _verify_clients(context, listener)
    return context


def http_context(http: Http) -> ListenerContext | None:
    """The context of the HTTP server, None without TLS.  Raises FileProblem."""
    if http.certfile is None or http.keyfile is None:
        return None
    context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
    _prepare(context, http.certfile, http.keyfile, http.tls_version, "http/1.1")
    _verify_clients(context, http)
    return context


def _verify_clients(context: ListenerContext, settings: Listener | Http) -> None:
    """Have client certificates verified as the settings say."""
    context.verify_mode = _MODES[settings.client_certificate]
    if context.verify_mode != ssl.CERT_NONE:
        # In a resumed session OpenSSL would not verify the certificate. It cannot be told to refuse sessions of TLS 1.2
        # without tickets, so `refusal` looks at those.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    if settings.cafile is not None:
        _load_authorities(context, "cafile", settings.cafile)
    if settings.crlfile is not None:
        from mqttbroker.net.revocation import RevocationLists, authorities_of

        context.revocations = RevocationLists(settings.crlfile, authorities_of(context))
        _load_authorities(context, "crlfile", settings.crlfile)
        whole = context.revocations.whole_chain
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN if whole else ssl.VERIFY_CRL_CHECK_LEAF


def _prepare(context: ListenerContext, certfile: Path, keyfile: Path, oldest: str, protocol: str) -> None:
    context.minimum_version = _VERSIONS[oldest]
    context.set_alpn_protocols([protocol])
    _load_certificate(context, certfile, keyfile)
    context.certificate_expires = _expiry(certfile)


def _expiry(certfile: Path) -> datetime | None:
    """When the first certificate of a chain expires; None if only OpenSSL can read one of them."""
    from cryptography import x509  # 8 MB, which a broker without TLS does not need

    try:
        return min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(certfile.read_bytes()))
    except (OSError, ValueError):
        return None


def _load_certificate(context: ssl.SSLContext, certfile: Path, keyfile: Path) -> None:
    for name, path in (("certfile", certfile), ("keyfile", keyfile)):
        _check_readable(name, path)
    try:
        context.load_cert_chain(certfile, keyfile, _no_password)
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "not PEM, or damaged"
        raise FileProblem(f"certfile {certfile} and keyfile {keyfile}: {reason}") from None
    except ValueError as error:
        raise FileProblem(f"keyfile {keyfile}: {error}") from None


def _load_authorities(context: ssl.SSLContext, name: str, path: Path) -> None:
    _check_readable(name, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise FileProblem(f"{name} {path}: not PEM, or damaged") from None


def _check_readable(name: str, path: Path) -> None:
    """Raise FileProblem with the file's name; errors of the ssl module do not have it."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise FileProblem(f"{name} {path}: {error.strerror}") from None


def _no_password() -> str:
    """Called for an encrypted key, instead of OpenSSL's prompt on the terminal."""
    raise ValueError("is encrypted; a broker that starts by itself needs a key without a password")
