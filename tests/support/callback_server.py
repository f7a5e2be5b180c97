"""An HTTP server that decides about logins, for tests of the HTTP callback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CallbackServer:
    """Answers by the user name, and keeps the requests. The user "hangs" is answered once `release` is set."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.release = threading.Event()
        self.answers: dict[str | None, tuple[int, bytes]] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a body would wait 40 ms for the acknowledgement of its header

            def do_POST(self) -> None:
                owner.answer(self)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://localhost:{self._server.server_address[1]}/login"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def say(self, username: str | None, answer: Any, status: int = 200) -> None:
        """Answer this user with a status and a body: bytes, or an object for JSON."""
        self.answers[username] = (status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or b"{}")
        self.requests.append(request)
        self.headers.append(dict(handler.headers.items()))
        self.paths.append(handler.path)
        username = request.get("username")
        if username == "hangs":
            self.release.wait(60)
        if username == "silent":
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        if username == "garbage":
            handler.wfile.write(b"\x00\xff nonsense \r\n\r\n")
            handler.close_connection = True
            return
        status, body = self.answers.get(username, (200, b'{"result": "deny"}'))
        handler.send_response(status)
        if username == "redirected":
            handler.send_header("Location", "/elsewhere")
        if username == "endless":
            handler.end_headers()
            handler.close_connection = True
            try:
                while not self.release.is_set():
                    handler.wfile.write(b" " * 65536)
            except OSError:
                pass
            return
        if username == "slow":
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")
            handler.wfile.flush()
            self.release.wait(60)
            return
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
