"""The HTTP API of a running broker, for commands: its address and token, its pages, and exit statuses of failures."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from mqttbroker import __version__
from mqttbroker.config.load import load_settings, secret_in

API = "/api/v1"
DONE, FAILED, WRONG_CALL, AWAY, NO_ACCESS = range(5)
EXIT_STATUSES = """\
exit status: 0 done; 1 refused by the broker, or there is no such thing; 2 wrong call; 3 the broker is away or of
another version; 4 the token is missing or has too little access"""
_ENVIRONMENT = "MQTTBROKER_API_"
_ANY_ADDRESS = ("", "*", "::", "0.0.0.0")
_PAGE = 1000


class CommandError(Exception):
    """A command failed: one line, and the exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the broker is."""
    where = parser.add_argument_group("broker")
    where.add_argument("--url", metavar="URL", help=f"the broker's HTTP address; else {_ENVIRONMENT}URL, else that of its configuration")
    where.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help=f"file of the bearer token; else {_ENVIRONMENT}TOKEN_FILE or {_ENVIRONMENT}TOKEN, else that of the configuration",
    )
    where.add_argument(
        "--token", metavar="TOKEN", help="the token itself, which other users of this machine can see in the list of processes"
    )
    where.add_argument("--ca-file", metavar="FILE", help=f"authorities that sign the broker's certificate; else {_ENVIRONMENT}CA_FILE")
    where.add_argument("--config", metavar="FILE", type=Path, help="the broker's TOML file")


class BrokerApi:
    """Requests to one broker. Methods raise CommandError."""

    def __init__(self, url: str, token: str | None, ca_file: str | None) -> None:
        from bridge_spark.source.http_client import HttpClient

        self.url = url
        self._client = HttpClient(url, token, ca_file, retries=1)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a GET; parameters that are None are left out."""
        return self.request("GET", API + path, None, query)

    def change(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """Send a change; keys of the body, and parameters, that are None are left out."""
        given = None if body is None else {name: value for name, value in body.items() if value is not None}
        return self.request(method, API + path, None if given is None else json.dumps(given).encode(), query)

    def request(self, method: str, path: str, body: bytes | None, query: Mapping[str, Any]) -> Any:
        """Send a request; returns the JSON of the answer."""
        from bridge_spark.source.http_client import HttpError

        given = {name: _text(value) for name, value in query.items() if value is not None}
        try:
            return self._client.call(method, path + (f"?{urlencode(given, quote_via=quote)}" if given else ""), body)
        except HttpError as error:
            raise self._failure(error) from None

    def read(self, path: str, position: int, length: int | None) -> bytes:
        """``length`` bytes of a file from ``position``, None = the whole file; `NotFound` if there is none."""
        from bridge_spark.source.http_client import HttpError, NotFound

        try:
            return self._client.get(path, position, length)
        except NotFound:
            raise
        except HttpError as error:
            raise self._failure(error) from None

    def stream(self, path: str, wait: float, **query: Any) -> Iterator[bytes]:
        """The pieces of the answer to a GET that takes up to ``wait`` seconds."""
        from bridge_spark.source.http_client import HttpError

        given = {name: _text(value) for name, value in query.items() if value is not None}
        try:
            yield from self._client.stream(f"{API}{path}?{urlencode(given, quote_via=quote)}", wait)
        except HttpError as error:
            raise self._failure(error) from None

    def items(self, path: str, limit: int, **query: Any) -> tuple[list[Any], bool]:
        """Up to ``limit`` items of a list, 0 = all; and whether there are more.

        A line on stderr names each core of a cluster whose items are missing.
        """
        found: list[Any] = []
        cursor: str | None = None
        while True:
            size = min(_PAGE, limit - len(found)) if limit else _PAGE
            page = self.get(path, limit=size, cursor=cursor, **query)
            with self.as_expected():
                found += page["items"]
                cursor = page["next_cursor"]
                missing = [f"shard {core['shard']} of {core['node'] or 'no node'}: {core['reason']}" for core in page.get("unanswered", ())]
            if cursor is None or (limit and len(found) >= limit):
                for line in missing:
                    print(f"mqttbroker: not in the list: {line}", file=sys.stderr)
                return found, cursor is not None

    @contextmanager
    def as_expected(self) -> Iterator[None]:
        """Report an answer of an unexpected form as that of a broker of another version."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CommandError(f"{self.url} does not answer as a broker of version {__version__} does ({error!r})", AWAY) from None

    def _failure(self, error: Any) -> CommandError:
        if error.status == 0:
            return CommandError(str(error), AWAY)
        if error.status in (401, 403):
            return CommandError(error.detail if error.status == 403 and error.detail else str(error), NO_ACCESS)
        if not error.detail:
            return CommandError(str(error), AWAY)
        unknown_path = not error.field and error.detail.startswith(("Not Found:", "Method Not Allowed:"))
        path = error.detail.partition(": ")[2]
        if unknown_path and re.search(rf"{API}/cluster\b", path):
            return CommandError(f"{self.url} is not a node of a cluster", FAILED)
        if unknown_path and self._is_node():
            return CommandError(f"{path}: not available at a node of a cluster; the cores of its shards have HTTP servers", FAILED)
        if unknown_path or "unknown parameter" in error.detail:
            reason = f"{self.url} is {self._version()}, this command is of {__version__}: {error.detail}"
            return CommandError(reason, AWAY)
        return CommandError(error.detail, FAILED)

    def _is_node(self) -> bool:
        """Whether it is the node process of a cluster."""
        from bridge_spark.source.http_client import HttpError

        try:
            return "nodes" in self._client.get_json(f"{API}/cluster")
        except (HttpError, TypeError):
            return False

    def _version(self) -> str:
        from bridge_spark.source.http_client import HttpError

        try:
            return f"a broker of version {self._client.get_json(f'{API}/status')['version']}"
        except (HttpError, KeyError, TypeError):
            return "no broker of a known version"


def broker_api(options: argparse.Namespace) -> BrokerApi:
    """The API that the options, the environment or the configuration name.

    Raises CommandError, and ConfigError if the settings cannot be read.
    """
    given = {name: os.environ.get(_ENVIRONMENT + name) for name in ("URL", "TOKEN", "TOKEN_FILE", "CA_FILE")}
    if options.token is not None and options.token_file is not None:
        raise CommandError("give --token or --token-file, not both", WRONG_CALL)
    url, token, file = options.url or given["URL"], options.token, options.token_file
    if token is None and file is None:
        token, file = given["TOKEN"], Path(given["TOKEN_FILE"]) if given["TOKEN_FILE"] else None
    http = None
    if url is None or (token is None and file is None):
        http = load_settings(options.config, os.environ).http
    if url is None and http is not None:
        if not http.port:
            reason = "the configuration has no http.port: give --url, like http://localhost:18083"
            raise CommandError(reason, WRONG_CALL)
        host = "localhost" if http.host in _ANY_ADDRESS else http.host
        url = f"{'http' if http.certfile is None else 'https'}://{f'[{host}]' if ':' in host else host}:{http.port}"
    check_url(url or "")
    try:
        found = token or (secret_in(file) if file is not None else None if http is None else http.command_token)
    except ValueError as error:
        raise CommandError(f"--token-file: {file}: {error}", WRONG_CALL) from None
    return BrokerApi(url or "", found, options.ca_file or given["CA_FILE"])


def check_url(url: str) -> None:
    """Raise CommandError if this cannot be the address of a broker."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise CommandError("--url must be the broker's HTTP address, like http://localhost:18083", WRONG_CALL)
    if parts.username is not None:
        raise CommandError("--url must not carry a name or password: give --token-file", WRONG_CALL)


def in_path(name: str) -> str:
    """A client id, user name or stream in a path."""
    return quote(name, safe="")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
