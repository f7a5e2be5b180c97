"""A configuration with a secret at every place that can hold one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqttbroker.auth.passwords import hash_password, scram_password
from mqttbroker.config.settings import Settings
from support.certificates import CertificateFiles

MARK = "s3cr3t"
# Every secret key of the configuration, with its value here: a new one needs a line.
KEYS = {
    "http.token": f"{MARK}-http-token",
    "http.access.token": f"{MARK}-access-token",
    "jwt.secret": f"{MARK}-jwt-secret-of-32-bytes-or-more",
    "http_callback.authorization": f"Bearer {MARK}-callback",
    "http_callback.headers": f"{MARK}-header",
    "plugin.options": f"{MARK}-option",
    "bridges.password": f"{MARK}-bridge",
    "cluster.sasl_password": f"{MARK}-kafka",
}
PASSWORD, SCRAM_PASSWORD = f"{MARK}-password", f"{MARK}-scram"


PLUGIN = """
class Silent:
    def __init__(self, key):
        pass

    async def authenticate(self, request):
        return None
"""


class SecretConfig:
    """``tables`` of a broker whose files are in a directory; ``secrets`` that are not marked with `MARK`."""

    def __init__(self, directory: Path) -> None:
        files = CertificateFiles(directory)
        hashed, scram = hash_password(PASSWORD.encode()), scram_password(SCRAM_PASSWORD.encode())
        (directory / "users").write_text(f"alice:{hashed}\nbob:{scram}\n")
        (directory / "rules").write_text("user alice\ntopic readwrite a/#\ntopic read $SYS/#\n")
        (directory / "access-token").write_text(KEYS["http.access.token"] + "\n")
        (directory / "silent.py").write_text(PLUGIN)
        self.audit_file = directory / "audit.log"
        self.secrets = [hashed, scram, files.keyfile.read_text().splitlines()[1]]
        self.tables: dict[str, Any] = {
            "allow_anonymous": False, "password_file": str(directory / "users"), "acl_file": str(directory / "rules"),
            "sys_interval": "100ms",
            "log": {"level": "debug", "audit_file": str(self.audit_file)},
            "http": {"token": KEYS["http.token"], "access": [
                {"name": "grafana", "role": "viewer", "token_file": str(directory / "access-token")}]},
            "jwt": {"algorithms": ["HS256"], "secret": KEYS["jwt.secret"], "token_in": "password"},
            "http_callback": {"url": f"http://127.0.0.1:9/?key={MARK}-query", "authorization": KEYS["http_callback.authorization"],
                              "headers": {"X-Api-Key": KEYS["http_callback.headers"]}},
            "plugin": {"object": "silent:Silent", "path": str(directory), "options": {"key": KEYS["plugin.options"]}},
            "streams": {"a": {"filters": ["a/#"], "partitions": 1}},
            "bridges": [{"name": "north", "addresses": ["127.0.0.1:9"], "username": "north", "password": KEYS["bridges.password"],
                         "topics": [{"filter": "a/#", "direction": "out"}]}],
            **files.config(),
        }  # fmt: skip


def secret_keys(section: type[Any] = Settings, path: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        if "section" in field.metadata:
            yield from secret_keys(field.metadata["section"], f"{path}{field.name}.")
        elif "tables" in field.metadata:
            yield from secret_keys(field.metadata["tables"], f"{path}{field.name}.")
        elif not field.repr:
            yield path + field.name
