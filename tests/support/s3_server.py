"""A local S3 server: localbucket from PyPI, with the requests it lacks, and faults that a test chooses.

It is enough for pyarrow, deltalake, pyiceberg and DuckDB, and writes conditionally (`If-None-Match: *`) as S3 does.  It is
a process of its own, as deltalake holds Python's lock while it waits for an answer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

import localbucket

ACCESS_KEY, SECRET_KEY, REGION = "the-access-key", "the-secret-key", "us-east-1"
_CONTROL = "/-faults"


class S3Server:
    """A server of the buckets in ``root``, at ``url``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._process = subprocess.Popen([sys.executable, "-P", __file__, str(root)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def delta_options(self) -> dict[str, str]:
        """`storage_options` of deltalake."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def iceberg_properties(self) -> dict[str, str]:
        """Properties of pyiceberg's file system."""
        return {"s3.endpoint": self.url, "s3.region": REGION, "s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET_KEY}

    def fail(self, method: str, path: str, every: int = 1, done: bool = False, times: int | None = None) -> None:
        """Answer 503 SlowDown to one in ``every`` requests, by chance, whose method and path match the expressions.

        ``done``: carry the request out all the same; ``times``: so often at most.
        """
        self._control({"method": method, "path": path, "every": every, "done": done, "times": times})

    def failed(self) -> int:
        """How many requests were answered with 503; none is from now on."""
        return int(self._control(None))

    def keys(self, bucket: str) -> list[str]:
        place = self.root / bucket
        return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _control(self, rule: Any) -> str:
        with urlopen(self.url + _CONTROL, json.dumps(rule).encode()) as answer:
            return str(answer.read().decode())


@contextmanager
def s3_server(root: Path, *buckets: str) -> Iterator[S3Server]:
    for bucket in buckets:
        (root / bucket).mkdir(parents=True)
    server = S3Server(root)
    try:
        yield server
    finally:
        server.close()


class _Handler(localbucket.S3Handler):  # type: ignore[misc]
    rules: list[dict[str, Any]] = []
    lock = threading.Lock()
    random = Random(1)
    failed = 0

    def _dispatch(self, action: Any) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path == _CONTROL:
            self._control()
            return
        rule = self._rule(path)
        if rule is None:
            self._answer(action, path, url.query)
            return
        if rule["done"]:
            out, self.wfile = self.wfile, _Nowhere()
            try:
                self._answer(action, path, url.query)
            finally:
                self.wfile = out
        else:
            self._read_body()
        body = b"<Error><Code>SlowDown</Code><Message>as the test asked</Message></Error>"
        self._send(HTTPStatus.SERVICE_UNAVAILABLE, body, {"Content-Type": "application/xml"}, self.command != "HEAD")

    def _answer(self, action: Any, path: str, query: str) -> None:
        if self.command == "POST" and query.startswith("delete"):
            self._delete_objects(path.strip("/"))
        elif self.command == "PUT" and path.endswith("/") and path.count("/") > 2:
            self._read_body()  # pyarrow marks a directory that it emptied; localbucket has directories
            self._send(HTTPStatus.OK)
        else:
            super()._dispatch(action)

    def _rule(self, path: str) -> dict[str, Any] | None:
        """The rule by which this request fails."""
        with self.lock:
            for rule in self.rules:
                if re.fullmatch(rule["method"], self.command) and re.search(rule["path"], path):
                    if rule["times"] != 0 and self.random.randrange(rule["every"]) == 0:
                        rule["times"] = None if rule["times"] is None else rule["times"] - 1
                        _Handler.failed += 1
                        return rule
        return None

    def _control(self) -> None:
        rule = json.loads(self._read_body())
        with self.lock:
            failed = self.failed
            if rule is None:
                self.rules.clear()
                _Handler.failed = 0
            else:
                self.rules.append(rule)
        self._send(HTTPStatus.OK, str(failed).encode())

    def _delete_objects(self, bucket: str) -> None:
        """DeleteObjects, which localbucket does not have."""
        keys = [unquote(key.decode()) for key in re.findall(rb"<Key>(.*?)</Key>", self._read_body())]
        for key in keys:
            self._object_path(bucket, key).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._send(HTTPStatus.OK, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {"Content-Type": "application/xml"})


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        """Nothing is kept."""


if __name__ == "__main__":
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"data_root": Path(sys.argv[1])}))
    http.daemon_threads = True
    print(f"http://127.0.0.1:{http.server_port}", flush=True)
    http.serve_forever()
