"""An HTTP server with a JSON Web Key Set, which also fails as servers do."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from support.patience import PATIENCE


class KeyServer:
    """Serves ``body`` on a free port of 127.0.0.1.

    ``mode`` is "ok", "error" (status 500), "redirect", "silent" (no answer), "held" (an answer once `release` is
    set), "slow" (a byte now and then) or "huge" (bytes without end).
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.mode = "ok"
        self.requests = 0
        self.release = threading.Event()
        self._closing = threading.Event()
        self._arrived = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._answer(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/keys"

    def wait_for_requests(self, count: int, timeout: float = PATIENCE) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.requests >= count, timeout), "no request in time"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        mode, body = self.mode, self.body
        with self._arrived:
            self.requests += 1
            self._arrived.notify_all()
        if mode == "held":
            self.release.wait(PATIENCE)
            mode = "ok"
        try:
            if mode == "silent":
                self._closing.wait()
            elif mode in ("error", "redirect"):
                handler.send_response(500 if mode == "error" else 302)
                handler.send_header("Location", self.url)
                handler.end_headers()
            else:
                handler.send_response(200)
                handler.send_header("Content-Type", "application/json")
                if mode == "ok":
                    handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                if mode == "ok":
                    handler.wfile.write(body)
                while mode == "huge":
                    handler.wfile.write(b" " * 65536)
                while mode == "slow" and not self._closing.wait(0.02):
                    handler.wfile.write(b" ")
        except OSError:
            pass  # the broker has hung up

    def close(self) -> None:
        self._closing.set()
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> KeyServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
