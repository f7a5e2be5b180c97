"""How to connect to remote brokers: TCP and TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqttbroker.config.remote_address import Address

KEPT: Final = 1.0  # seconds for which a connection must stay open
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsTerms(NamedTuple):
    """``verify`` False accepts any certificate; ``cafile`` None = the authorities of the system."""

    cafile: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    verify: bool = True
    server_name: str | None = None
    version: str = "1.2"


def client_context(terms: TlsTerms, websocket: bool) -> ssl.SSLContext:
    """A context for connections to remotes. Raises OSError for a file that cannot be used; the text names it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = _VERSIONS[terms.version]
    context.set_alpn_protocols(["http/1.1" if websocket else "mqtt"])
    if not terms.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif terms.cafile is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(terms.cafile)
        except ssl.SSLError:
            raise OSError(f"cafile {terms.cafile}: not PEM, or damaged") from None
        except OSError as error:
            raise OSError(f"cafile {terms.cafile}: {error.strerror}") from None
    if terms.certfile is not None:
        try:
            context.load_cert_chain(terms.certfile, terms.keyfile, lambda: "")
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            reason = "they do not belong together" if mismatch else "not PEM, encrypted, or damaged"
            raise OSError(f"certfile {terms.certfile} and keyfile {terms.keyfile}: {reason}") from None
        except OSError as error:
            raise OSError(f"certfile {terms.certfile} or keyfile {terms.keyfile}: {error.strerror}") from None
    return context


async def connect(address: Address, tls: TlsTerms, protocol: Callable[[], Any], timeout: float) -> None:
    """Connect a new protocol to an address. Raises OSError; `reason_of` has its reason."""
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {}
    if address.tls:
        # It reads files: those of the system's authorities take many milliseconds.
        options["ssl"] = await loop.run_in_executor(None, client_context, tls, address.websocket)
        options["server_hostname"] = tls.server_name or address.host
        options["ssl_handshake_timeout"] = timeout
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(protocol, address.host, address.port, **options)
    except TimeoutError:
        raise OSError(f"no connection within {timeout:g} s") from None


async def answers(address: Address, timeout: float) -> bool:
    """Whether something accepts a TCP connection at an address and keeps it, which a proxy without a server does not."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return False
    try:
        async with asyncio.timeout(KEPT):
            await reader.read(1)
        return False  # it sends nothing before CONNECT, so this was the end
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        writer.close()


def reason_of(error: Exception) -> str:
    """Why a connect failed, in one line."""
    if isinstance(error, socket.gaierror):
        return f"unknown host: {error.strerror}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the remote is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
