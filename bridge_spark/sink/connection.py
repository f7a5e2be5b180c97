"""One network connection to a broker: TCP or TLS, CONNECT and CONNACK, bytes out and packets in."""

from __future__ import annotations

import os
import select
import socket
import ssl

from bridge_spark.sink import packets
from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import SinkOptions
from bridge_spark.sink.packets import BadPacket, Capabilities

# In seconds; a task that waits longer for its rows connects again.
KEEP_ALIVE = 300
READ_BYTES = 1 << 16

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")


class Lost(Exception):
    """The connection is gone or was not made; a later one may succeed.  The text is the reason."""


class Connection:
    """An open connection.  `connect` raises `Lost`, or `SinkError` if no later attempt would succeed."""

    def __init__(self, options: SinkOptions, client_id: str) -> None:
        self._options = options
        self._client_id = client_id
        self._socket: socket.socket | None = None
        self._data = b""
        self.capabilities = Capabilities()

    def connect(self) -> None:
        options = self._options
        self.close()
        try:
            plain = socket.create_connection((options.host, options.port), options.request_timeout)
        except OSError as error:
            raise Lost(_reason(error)) from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = self._secured(plain) if options.secure else plain
            self._login()
        except BaseException:
            plain.close()
            self.close()
            raise

    def _secured(self, plain: socket.socket) -> socket.socket:
        options = self._options
        try:
            return tls_context(options).wrap_socket(plain, server_hostname=options.host)
        except ssl.SSLCertVerificationError as error:
            raise SinkError(
                f"{options.address}: its certificate is not to be trusted: {error.verify_message} "
                f"(option 'caFile' names the authorities to trust)"
            ) from None
        except ssl.SSLError as error:
            if error.reason in _NO_TLS:
                raise SinkError(f"{options.address} does not speak TLS: begin the address with mqtt://") from None
            raise Lost(f"{_reason(error)}: does it speak TLS there?") from None
        except OSError as error:
            raise Lost(f"{_reason(error)}: does it speak TLS there?") from None

    def _login(self) -> None:
        options = self._options
        self.send(packets.connect(options.version, self._client_id, options.user, options.password, KEEP_ALIVE))
        try:
            while (found := packets.next_packet(self._data, 0)) is None:
                self.receive()
                if self._data[0] >> 4 != packets.CONNACK:
                    raise BadPacket("another packet where CONNACK comes")
            first, start, end = found
            refusal, self.capabilities = packets.read_connack(options.version, self._data[start:end])
        except BadPacket as error:
            raise SinkError(f"{options.address} does not answer in MQTT: {error}") from None
        self._data = self._data[end:]
        if refusal is not None:
            text = f"{options.address} refused the connection: {refusal.text}"
            if refusal.transient:
                raise Lost(text)
            raise SinkError(text)

    def send(self, data: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Lost(_reason(error)) from None

    def receive(self) -> bytes:
        """Wait for data; returns everything received that `consumed` was not called for."""
        assert self._socket is not None
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError:
            raise Lost(f"nothing came for {self._options.request_timeout:g} s") from None
        except OSError as error:
            raise Lost(_reason(error)) from None
        if not data:
            raise Lost("the broker closed the connection")
        self._data += data
        return self._data

    def has_data(self) -> bool:
        """Whether `receive` would return at once."""
        assert self._socket is not None
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        return bool(select.select([self._socket], [], [], 0)[0])

    def consumed(self, count: int) -> None:
        """Drop bytes that were handled."""
        self._data = self._data[count:]

    def close(self, politely: bool = False) -> None:
        """Close the connection, ``politely`` with DISCONNECT."""
        if self._socket is None:
            return
        try:
            if politely:
                self._socket.sendall(packets.GOODBYE)
        except OSError:
            pass
        finally:
            self._socket.close()
            self._socket = None
            self._data = b""


def tls_context(options: SinkOptions) -> ssl.SSLContext:
    """The context for the options; raises `SinkError` for unusable files."""
    for name, path in (("caFile", options.ca_file), ("certFile", options.cert_file), ("keyFile", options.key_file)):
        if path is not None and not os.access(path, os.R_OK):
            reason = "cannot be read" if os.path.exists(path) else "does not exist"
            raise SinkError(f"option '{name}': {path} {reason}")
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ssl.SSLError):
        raise SinkError(f"option 'caFile': {options.ca_file} has no certificates in PEM") from None
    if options.cert_file is not None:
        try:
            context.load_cert_chain(options.cert_file, options.key_file, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise SinkError(f"option 'certFile': {options.cert_file}: {reason.replace('_', ' ').lower()}") from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return error.strerror or str(error) or type(error).__name__
