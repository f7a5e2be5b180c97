"""``mqttbroker healthcheck``: asks the broker of this machine for /livez, where its configuration has the HTTP server.

Exit status: 0 = it lives, or has no HTTP server to ask; 1 = it does not answer; 2 = wrong call or configuration.
"""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqttbroker.config.load import FLAGS, load_settings
from mqttbroker.config.settings import Http

TIMEOUT = 5.0  # seconds
_ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "healthcheck",
        help="ask the broker of this machine whether it lives",
        allow_abbrev=False,
        epilog="exit status: 0 it lives, or has no HTTP server; 1 it does not answer; 2 wrong call or configuration",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="FILE", type=Path, help="the broker's TOML file")
    which.add_argument("--pid", metavar="PID", type=int, help="take the file and flags from the command line of this process")


def run(options: argparse.Namespace, serve_options: Callable[[list[str]], argparse.Namespace]) -> int:
    """Run the command; ``serve_options`` parses a command line that begins with ``serve``."""
    config: Path | None = options.config
    flags: dict[str, str] = {}
    if options.pid is not None:
        try:
            words = Path(f"/proc/{options.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError as error:
            return _failed(f"process {options.pid}: {error.strerror}")
        if "serve" not in words:
            return _failed(f"process {options.pid} is no mqttbroker serve")
        served = serve_options(words[words.index("serve") :])
        config = served.config
        flags = {flag: value for flag in FLAGS if (value := getattr(served, flag)) is not None}
    settings = load_settings(config, os.environ, flags, lambda _: None).http
    if settings.port is None:
        print('http.port is "off", so there is nothing to ask')
        return 0
    if settings.port == 0:
        print("mqttbroker healthcheck: http.port is 0, so the port is not known", file=sys.stderr)
        return 2
    return _ask(settings, settings.port)


def _ask(settings: Http, port: int) -> int:
    host = _ANY_ADDRESS.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    if settings.certfile is not None:
        # It may have a name for clients only. Nothing is sent that another server must not read.
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=ssl._create_unverified_context())
    try:
        if settings.certfile is not None and settings.client_certificate == "required":
            connection.connect()  # with TLS 1.3 the server has answered before it asks for the certificate
            print("it lives; it wants a client certificate, so it was not asked for more than a handshake")
            return 0
        connection.request("GET", "/livez")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _failed(f"{host}:{port}: {error}")
    finally:
        connection.close()
    if status != 200:
        return _failed(f"{host}:{port}: status {status}")
    print("it lives")
    return 0


def _failed(reason: str) -> int:
    print(f"mqttbroker healthcheck: {reason}", file=sys.stderr)
    return 1
