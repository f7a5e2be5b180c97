"""SSL contexts from the files of a listener or of the HTTP server.

Each call reads all files into a new context, so that nothing of the old ones remains after a reload. An error is one
line that names the file.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Optional

from mqttbroker.config.settings import Http, Listener

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_MODES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_ALPN = {"tls": "mqtt", "wss": "http/1.1"}


def server_context(listener: Listener) -> Optional[ssl.SSLContext]:
    """The context of a listener, None without TLS.  Raises OSError for an invalid file."""
    if listener.type not in _ALPN:
        return None
    assert listener.certfile is not None and listener.keyfile is not None
    context = _context(listener.certfile, listener.keyfile, listener.tls_version, _ALPN[listener.type])
    context.verify_mode = _MODES[listener.client_certificate]
    for name, path in (("cafile", listener.cafile), ("crlfile", listener.crlfile)):
        if path is not None:
            _load_authorities(context, name, path)
    if listener.crlfile is not None:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def http_context(http: Http) -> Optional[ssl.SSLContext]:
    """The context of the HTTP server, None without TLS.  Raises OSError for an invalid file."""
    if http.certfile is None or http.keyfile is None:
        return None
    return _context(http.certfile, http.keyfile, http.tls_version, "http/1.1")


def _context(certfile: Path, keyfile: Path, oldest: str, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[oldest]
    context.set_alpn_protocols([protocol])
    _load_certificate(context, certfile, keyfile)
    return context


def _load_certificate(context: ssl.SSLContext, certfile: Path, keyfile: Path) -> None:
    for name, path in (("certfile", certfile), ("keyfile", keyfile)):
        _check_readable(name, path)
    try:
        context.load_cert_chain(certfile, keyfile, _no_password)
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "not PEM, or damaged"
        raise OSError(f"certfile {certfile} and keyfile {keyfile}: {reason}") from None
    except ValueError as error:
        raise OSError(f"keyfile {keyfile}: {error}") from None


def _load_authorities(context: ssl.SSLContext, name: str, path: Path) -> None:
    _check_readable(name, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise OSError(f"{name} {path}: not PEM, or damaged") from None


def _check_readable(name: str, path: Path) -> None:
    """Raise OSError with the file's name; errors of the ssl module do not have it."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise OSError(f"{name} {path}: {error.strerror}") from None


def _no_password() -> str:
    """Called for an encrypted key, instead of OpenSSL's prompt on the terminal."""
    raise ValueError("is encrypted; a broker that starts by itself needs a key without a password")
