"""Requests of a node of a cluster to the HTTP servers of cores: its own ones directly, others by the node that owns the shard."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.parameters import MAX_BODY
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import API, PROBLEM, PROBLEM_SCHEMA, Answer, Parameter, Route, read_body
from mqttbroker.admin.http.schemas import INTEGER
from mqttbroker.cluster.nodes.core_processes import CoreProcess
from mqttbroker.config.settings import Settings
from mqttbroker.node.shards import NodeShards

ASK_TIMEOUT: Final = 5.0  # seconds for the answer of one core
MAX_ANSWER: Final = 64 * 1024 * 1024  # bytes
SHARDS_PATH: Final = "/cluster/shards"  # below /api/v1: /cluster/shards/N/clients is /clients of the core of shard N
_FORWARDED: Final = "Mqttbroker-Forwarded"  # header of a request that a node has forwarded, which no other one forwards


class CoreAway(Exception):
    """The core of a shard gives no answer: the name of its node ("" = no node owns the shard), and one line."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class CoreAnswer(NamedTuple):
    """The answer of a core."""

    status: int
    body: bytes
    media_type: str
    node: str

    def json(self) -> Any:
        """The body. Raises CoreAway if it is not JSON."""
        try:
            return json.loads(self.body) if self.body else None
        except ValueError:
            raise CoreAway(self.node, "answers with something else than JSON") from None


class _CoreServer(NamedTuple):
    """Where the core of a shard is asked: the URL of its server, or that of its node with a path to it."""

    node: str
    url: str
    prefix: str
    here: bool


class CoreHttp:
    """The HTTP servers of the cores of all shards. Methods run on the thread of the node's HTTP server."""

    def __init__(self, shards: NodeShards, runner: ControlRunner, settings: Callable[[], Settings]) -> None:
        self.count = shards.cluster.shards
        self._shards = shards
        self._runner = runner
        self._settings = settings
        self._tls: tuple[Settings | None, Any, Any] = (None, None, None)

    async def ask(
        self, shard: int, method: str, path: str, query: Mapping[str, str] = {}, body: Mapping[str, Any] | None = None
    ) -> CoreAnswer:
        """Send a request below /api/v1 to the core of a shard, on whatever node it is, as the sender of commands.

        ``path`` is percent-encoded. Raises CoreAway.
        """
        token = self._settings().http.command_token
        url = URL.build(path=path, encoded=True).with_query(query)
        data = None if body is None else json.dumps(body).encode()
        return await self._send(shard, method, url.raw_path_qs, data, f"Bearer {token}" if token else None, True)

    async def metrics(self, shard: int) -> str:
        """The metrics of a core of this node. Raises CoreAway."""
        place = await self._place(shard, True)
        if not place.here:
            raise CoreAway(place.node, "is not on this node")
        token = self._settings().http.command_token
        answer = await self._request(place, "GET", f"{place.url}/metrics", None, f"Bearer {token}" if token else None)
        if answer.status != 200:
            raise CoreAway(place.node, f"answers with status {answer.status}")
        return answer.body.decode()

    # -- routes --------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """The API of each core below `SHARDS_PATH`: the core itself checks what the sender may do."""
        problem = Answer("no answer of the core", PROBLEM_SCHEMA, PROBLEM)
        shard = Parameter("shard", {"type": "integer", "minimum": 0, "maximum": self.count - 1}, "its number", "path", True)
        return [
            Route(method, f"{API}{SHARDS_PATH}/{{shard:[0-9]+}}/{{path:.+}}", self._forward, Right.NONE,
                  "The API of the core of a shard", {200: Answer("as the core answers", INTEGER), 503: problem}, (shard,),
                  tag="cluster", documented=False)
            for method in ("GET", "PUT", "POST", "PATCH", "DELETE")
        ]  # fmt: skip

    async def _forward(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        number = request.match_info["shard"]
        if int(number) >= self.count:
            raise RequestError(404, f"there is no shard {int(number)}, they are 0 to {self.count - 1}", "shard")
        _, _, path = request.rel_url.raw_path_qs.partition(f"{API}{SHARDS_PATH}/{number}")
        body = await read_body(request, MAX_BODY) if request.can_read_body else None
        token = request.headers.get("Authorization")
        if token is None and request.transport is not None and request.transport.get_extra_info("peercert"):
            # The core would see this node's certificate, which may have another role.
            raise RequestError(403, "a request to one core needs a token: the certificate of its sender is not passed on")
        try:
            answer = await self._send(int(number), request.method, path, body, token, _FORWARDED not in request.headers)
        except CoreAway as away:
            raise RequestError(503, away_text(int(number), away)) from None
        return web.Response(status=answer.status, body=answer.body, content_type=answer.media_type)

    # -- requests --------------------------------------------------------------------

    async def _send(self, shard: int, method: str, path: str, body: bytes | None, authorization: str | None, anywhere: bool) -> CoreAnswer:
        place = await self._place(shard, anywhere)
        return await self._request(place, method, f"{place.url}{place.prefix}{path}", body, authorization)

    async def _place(self, shard: int, anywhere: bool) -> _CoreServer:
        return await asyncio.wrap_future(self._runner.call(self._found_place, shard, anywhere))

    def _found_place(self, shard: int, anywhere: bool) -> _CoreServer:
        """On the event loop. Raises CoreAway."""
        shards = self._shards
        port = http_port_of(shards.cores[shard])
        if port is not None:
            http = self._settings().http
            host = "127.0.0.1" if http.host in ("", "0.0.0.0") else "::1" if http.host == "::" else http.host
            scheme = "http" if http.certfile is None else "https"
            return _CoreServer(shards.name, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", API, True)
        directory = shards.directory
        owner = None if directory is None else directory.shards[shard][0]
        if directory is None or owner is None or owner not in directory.members:
            raise CoreAway("", "no node owns the shard")
        url = directory.members[owner].http
        if owner == shards.name or not anywhere:
            raise CoreAway(owner, "its core does not serve yet")
        if not url:
            raise CoreAway(owner, "the node has no HTTP server")
        return _CoreServer(owner, url, f"{API}{SHARDS_PATH}/{shard}", False)

    async def _request(self, place: _CoreServer, method: str, url: str, body: bytes | None, authorization: str | None) -> CoreAnswer:
        headers = {"Accept-Encoding": "identity", _FORWARDED: "1"}
        if authorization is not None:
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = "application/json"
        tls = self._contexts()[0 if place.here else 1] if url.startswith("https:") else True
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT),
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.request(method, URL(url, encoded=True), data=body, headers=headers, ssl=tls, allow_redirects=False) as response,
            ):
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > MAX_ANSWER:
                        raise CoreAway(place.node, f"its answer has more than {MAX_ANSWER} bytes")
                return CoreAnswer(response.status, bytes(answer), response.content_type, place.node)
        except TimeoutError:
            raise CoreAway(place.node, f"no answer within {ASK_TIMEOUT:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CoreAway(place.node, str(error) or type(error).__name__) from None

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """The TLS contexts for cores of this node, and for other nodes."""
        settings = self._settings()
        known, own, others = self._tls
        if known is not settings:
            http = settings.http
            # It is this machine, and the core's certificate has the node's name, not this address.
            own = ssl._create_unverified_context()
            others = ssl.create_default_context()
            if settings.cluster.link_cafile is not None:
                others.load_verify_locations(settings.cluster.link_cafile)
            if http.certfile is not None:
                for context in (own, others):
                    context.load_cert_chain(http.certfile, http.keyfile)
            self._tls = (settings, own, others)
        return own, others


def http_port_of(core: CoreProcess) -> int | None:
    """The HTTP port of a core that owns its shard; None if it does not serve HTTP now."""
    status = core.status
    return status.http_port if core.owns and status is not None else None


def away_text(shard: int, away: CoreAway) -> str:
    """One line that names the shard, its node and the reason."""
    return f"shard {shard}{f' of {away.node}' if away.node else ''}: {away}"
