"""The options of ``mqttbroker pub``, ``sub`` and ``bench``, which are those of mosquitto_pub and mosquitto_sub."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

# The protocol levels of the versions (3.1.2.2).
VERSIONS = {"mqttv31": 3, "31": 3, "mqttv311": 4, "311": 4, "mqttv5": 5, "5": 5}
_SCHEMES = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_TLS_VERSIONS = {"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}


class OptionError(Exception):
    """A wrong call; one line."""


class BrokerAddress(NamedTuple):
    """A broker. ``transport`` as paho names it."""

    transport: Literal["tcp", "unix", "websockets"]
    host: str
    port: int
    path: str
    tls: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``pub`` and ``sub`` have."""
    add_connection_options(parser)
    add = parser.add_argument
    add("-i", "--id", metavar="ID", help="client id")
    add("-I", "--id-prefix", metavar="PREFIX", help="client id, with the process id added")
    add("-c", "--disable-clean-session", action="store_true", help="keep the session; needs -i")
    add("-x", "--session-expiry-interval", type=int, metavar="SECONDS", help="of the session, with -V mqttv5")
    add(
        "-D",
        "--property",
        action="append",
        nargs="+",
        default=[],
        metavar="WORD",
        help="PACKET NAME VALUE, with -V mqttv5: publish content-type text/plain; publish user-property NAME VALUE",
    )
    add("-q", "--qos", type=int, choices=(0, 1, 2), default=0, help="default: 0")
    add("-d", "--debug", action="store_true", help="print packets on stderr")
    add("--quiet", action="store_true", help="print no errors")
    add("--will-topic", metavar="TOPIC")
    add("--will-payload", metavar="TEXT", default="")
    add("--will-qos", type=int, choices=(0, 1, 2), default=0)
    add("--will-retain", action="store_true")


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a connection, which all MQTT commands have; ``-h`` is the host, as with Mosquitto."""
    add = parser.add_argument
    add("--help", action="help", help="show this help")
    add("-h", "--host", default="localhost", metavar="HOST", help="default: localhost")
    add("-p", "--port", type=int, metavar="PORT", help="default: 1883, 8883 with TLS")
    add("--unix", metavar="PATH", help="connect to a Unix socket")
    add("--ws", action="store_true", help="connect by WebSocket")
    add("-L", "--url", metavar="URL", help="[mqtt|mqtts|ws|wss]://[user[:password]@]host[:port]/topic, in the place of -h -p -t -u -P")
    add("-u", "--username", metavar="USER")
    add("-P", "--pw", metavar="PASSWORD", help="which other users of this machine can see in the list of processes")
    add("--pw-file", metavar="FILE", type=Path, help="a file with the password")
    add("-V", "--protocol-version", choices=tuple(VERSIONS), default="mqttv311", help="default: mqttv311")
    add("-k", "--keepalive", type=int, default=60, metavar="SECONDS", help="default: 60")
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--cafile", metavar="FILE", help="trusted authorities")
    tls.add_argument("--capath", metavar="DIR", help="a directory of them")
    tls.add_argument("--tls-use-os-certs", action="store_true", help="trust the authorities of the system")
    tls.add_argument("--cert", metavar="FILE", help="a client certificate")
    tls.add_argument("--key", metavar="FILE", help="its key")
    tls.add_argument("--insecure", action="store_true", help="do not compare the host with the names in the certificate")
    tls.add_argument("--tls-version", choices=tuple(_TLS_VERSIONS))
    tls.add_argument("--tls-alpn", metavar="NAME")
    tls.add_argument("--ciphers", metavar="LIST")


def apply_url(options: argparse.Namespace) -> None:
    """Put the parts of ``-L`` in the place of ``-h``, ``-p``, ``-t``, ``-u`` and ``-P``."""
    options.scheme = "mqtt"
    if options.url is None:
        return
    try:
        parts = urlsplit(options.url)
        options.port = parts.port or options.port
    except ValueError as error:
        raise OptionError(f"-L: {error}") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise OptionError("-L must be mqtt://, mqtts://, ws:// or wss:// with a host")
    options.scheme, options.host = parts.scheme, parts.hostname
    options.ws = options.ws or parts.scheme in ("ws", "wss")
    if parts.username is not None:
        options.username = unquote(parts.username)
    if parts.password is not None:
        options.pw = unquote(parts.password)
    topic = unquote(parts.path[1:])
    if topic:
        options.topic = [*options.topic, topic] if isinstance(options.topic, list) else topic


def place(options: argparse.Namespace) -> BrokerAddress:
    """The broker that the options name."""
    tls = options.scheme in ("mqtts", "wss") or options.port == 8883 or options.tls_use_os_certs
    tls = tls or any((options.cafile, options.capath, options.cert, options.insecure))
    if options.unix:
        return BrokerAddress("unix", options.unix, 1, "", False)
    port = options.port or (_SCHEMES["mqtts"] if tls else _SCHEMES["mqtt"])
    return BrokerAddress("websockets" if options.ws else "tcp", options.host, port, "/mqtt", tls)


def password(options: argparse.Namespace) -> str | None:
    """The password of the options; None if they have none. Raises OptionError."""
    if options.pw_file is None:
        return options.pw  # type: ignore[no-any-return]
    try:
        return options.pw_file.read_text(encoding="utf-8").rstrip("\r\n")  # type: ignore[no-any-return]
    except OSError as error:
        raise OptionError(f"--pw-file: {options.pw_file}: {error.strerror}") from None


def tls_context(options: argparse.Namespace) -> ssl.SSLContext:
    """The TLS settings of the options. Raises OptionError."""
    try:
        context = ssl.create_default_context(cafile=options.cafile, capath=options.capath)
        if options.cert:
            context.load_cert_chain(options.cert, options.key)
        if options.ciphers:
            context.set_ciphers(options.ciphers)
    except OSError as error:
        raise OptionError(f"TLS: {error.strerror or error}") from None
    if options.insecure:
        context.check_hostname = False
    if options.tls_version:
        context.minimum_version = context.maximum_version = _TLS_VERSIONS[options.tls_version]
    if options.tls_alpn:
        context.set_alpn_protocols([options.tls_alpn])
    return context
