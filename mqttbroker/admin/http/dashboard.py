"""The dashboard: the files of a web page, which asks the API for everything that it shows.

The files are public and have no data of the broker. They are read at the start and served from memory.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

from aiohttp import web

from mqttbroker.admin.http.access import Principal
from mqttbroker.admin.http.routes import Answer, Route

PATH = "/dashboard/"
MEDIA_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
HEADERS = {
    # The page runs its own scripts only, and no text becomes HTML or a script. It connects to this server, and to the
    # WebSocket listeners of the broker, which may have any address behind a proxy.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self' ws: wss:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # a browser asks each time, and gets 304
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str

    async def serve(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        headers = {**HEADERS, "ETag": f'"{self.etag}"'}
        if any(tag.value in (self.etag, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.content, content_type=self.media_type, charset="utf-8", headers=headers)


def dashboard_routes() -> list[Route]:
    """A route for each file; ``/`` is the page."""
    routes = []
    for path in sorted((files("mqttbroker.admin") / "dashboard").iterdir(), key=lambda path: path.name):
        content = path.read_bytes()
        media_type = MEDIA_TYPES[path.name.rpartition(".")[2]]
        found = _File(content, media_type, hashlib.sha256(content).hexdigest()[:32])
        answers = {200: Answer("the file", {"type": "string"}, media_type), 304: Answer("the browser has it")}
        place = "/" if path.name == "index.html" else PATH + path.name
        summary = f"{path.name} of the dashboard"
        routes.append(Route("GET", place, found.serve, None, summary, answers, documented=False))
    return routes
