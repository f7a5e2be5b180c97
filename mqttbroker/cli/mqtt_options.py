"""The options of ``mqttbroker pub`` and ``sub``, which are those of mosquitto_pub and mosquitto_sub."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional
from urllib.parse import unquote, urlsplit

from paho.mqtt import MQTTException
from paho.mqtt.client import Client, MQTTv5, MQTTv31, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

PACKETS = {
    "connect": PacketTypes.CONNECT, "publish": PacketTypes.PUBLISH, "subscribe": PacketTypes.SUBSCRIBE,
    "unsubscribe": PacketTypes.UNSUBSCRIBE, "disconnect": PacketTypes.DISCONNECT, "will": PacketTypes.WILLMESSAGE,
}  # fmt: skip
VERSIONS = {"mqttv31": MQTTv31, "31": MQTTv31, "mqttv311": MQTTv311, "311": MQTTv311, "mqttv5": MQTTv5, "5": MQTTv5}
NEVER = 0xFFFFFFFF
MAX_RECONNECT_DELAY = 5  # seconds between two attempts to connect again
_SCHEMES = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_BYTES = ("CorrelationData", "AuthenticationData")
_TLS_VERSIONS = {"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}


class OptionError(Exception):
    """A wrong call; one line."""


class Place(NamedTuple):
    """A broker. ``transport`` as paho names it."""

    transport: Literal["tcp", "unix", "websockets"]
    host: str
    port: int
    path: str
    tls: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands have; ``-h`` is the host, as with Mosquitto."""
    add = parser.add_argument
    add("--help", action="help", help="show this help")
    add("-h", "--host", default="localhost", metavar="HOST", help="default: localhost")
    add("-p", "--port", type=int, metavar="PORT", help="default: 1883, 8883 with TLS")
    add("--unix", metavar="PATH", help="connect to a Unix socket")
    add("--ws", action="store_true", help="connect by WebSocket")
    add("-L", "--url", metavar="URL",
        help="[mqtt|mqtts|ws|wss]://[user[:password]@]host[:port]/topic, in the place of -h -p -t -u -P")
    add("-i", "--id", metavar="ID", help="client id")
    add("-I", "--id-prefix", metavar="PREFIX", help="client id, with the process id added")
    add("-u", "--username", metavar="USER")
    add("-P", "--pw", metavar="PASSWORD", help="which other users of this machine can see in the list of processes")
    add("--pw-file", metavar="FILE", type=Path, help="a file with the password")
    add("-V", "--protocol-version", choices=tuple(VERSIONS), default="mqttv311", help="default: mqttv311")
    add("-k", "--keepalive", type=int, default=60, metavar="SECONDS", help="default: 60")
    add("-c", "--disable-clean-session", action="store_true", help="keep the session; needs -i")
    add("-x", "--session-expiry-interval", type=int, metavar="SECONDS", help="of the session, with -V mqttv5")
    add("-D", "--property", action="append", nargs="+", default=[], metavar="WORD",
        help="PACKET NAME VALUE, with -V mqttv5: publish content-type text/plain; publish user-property NAME VALUE")
    add("-q", "--qos", type=int, choices=(0, 1, 2), default=0, help="default: 0")
    add("-d", "--debug", action="store_true", help="print packets on stderr")
    add("--quiet", action="store_true", help="print no errors")
    add("--will-topic", metavar="TOPIC")
    add("--will-payload", metavar="TEXT", default="")
    add("--will-qos", type=int, choices=(0, 1, 2), default=0)
    add("--will-retain", action="store_true")
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


def place(options: argparse.Namespace) -> Place:
    """The broker that the options name."""
    tls = options.scheme in ("mqtts", "wss") or options.port == 8883 or options.tls_use_os_certs
    tls = tls or any((options.cafile, options.capath, options.cert, options.insecure))
    if options.unix:
        return Place("unix", options.unix, 1, "", False)
    port = options.port or (_SCHEMES["mqtts"] if tls else _SCHEMES["mqtt"])
    return Place("websockets" if options.ws else "tcp", options.host, port, "/mqtt", tls)


def make_client(options: argparse.Namespace, where: Place, reconnects: bool) -> Client:
    """A client of these options, not connected. Raises OptionError."""
    version = VERSIONS[options.protocol_version]
    client_id = options.id if options.id_prefix is None else f"{options.id_prefix}{os.getpid()}"
    if options.disable_clean_session and client_id is None:
        raise OptionError("-c needs -i or -I")
    client = Client(
        CallbackAPIVersion.VERSION2, client_id or "", None if version == MQTTv5 else not options.disable_clean_session,
        protocol=version, transport=where.transport, reconnect_on_failure=reconnects,
    )  # fmt: skip
    if where.transport == "websockets":
        client.ws_set_options(where.path)
    password = options.pw
    if options.pw_file is not None:
        try:
            password = options.pw_file.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise OptionError(f"--pw-file: {options.pw_file}: {error.strerror}") from None
    if options.username is not None or password is not None:
        client.username_pw_set(options.username, password)
    try:
        if options.will_topic is not None:
            will = properties(options, "will")
            client.will_set(options.will_topic, options.will_payload, options.will_qos, options.will_retain, will)
        if where.tls:
            client.tls_set_context(_tls_context(options))
            client.tls_insecure_set(options.insecure)
    except ValueError as error:
        raise OptionError(str(error)) from None
    client.max_inflight_messages_set(100)
    client.reconnect_delay_set(1, MAX_RECONNECT_DELAY)
    return client


def connect(client: Client, options: argparse.Namespace, where: Place) -> None:
    """Connect; the CONNACK comes later. Raises OSError and OptionError."""
    if VERSIONS[options.protocol_version] != MQTTv5:
        client.connect(where.host, where.port, options.keepalive)
        return
    expiry = options.session_expiry_interval
    if expiry is None and options.disable_clean_session:
        expiry = NEVER
    given = properties(options, "connect") or Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    if expiry is not None:
        given.SessionExpiryInterval = expiry
    client.connect(where.host, where.port, options.keepalive, clean_start=not options.disable_clean_session,
                   properties=given)


def _tls_context(options: argparse.Namespace) -> ssl.SSLContext:
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


def properties(options: argparse.Namespace, packet: str) -> Optional[Properties]:
    """The properties that ``-D`` gives to a packet; None if there are none. Raises OptionError."""
    given: Sequence[list[str]] = [words for words in options.property if words[0].lower() == packet]
    for words in options.property:
        if words[0].lower() not in PACKETS:
            raise OptionError(f"-D: {words[0]} must be one of {', '.join(PACKETS)}")
    if not given:
        return None
    if VERSIONS[options.protocol_version] != MQTTv5:
        raise OptionError("-D needs -V mqttv5")
    found = Properties(PACKETS[packet])  # type: ignore[no-untyped-call]
    for _, *rest in given:
        text = " ".join(rest)
        name = re.sub(r"(?:^|-)(\w)", lambda match: match[1].upper(), rest[0].lower() if rest else "")
        if len(rest) != (3 if name == "UserProperty" else 2):
            raise OptionError(f"-D {packet} {text}: must be a name and a value, user-property a name and two")
        value: Any = (rest[1], rest[2]) if name == "UserProperty" else rest[1]
        if name in _BYTES:
            value = rest[1].encode()
        elif name != "UserProperty" and rest[1].isdecimal() and name not in ("ContentType", "ResponseTopic"):
            value = int(rest[1])
        try:
            setattr(found, name, value)
        except (MQTTException, AttributeError, TypeError, ValueError) as error:
            raise OptionError(f"-D {packet} {text}: {error}") from None
    return found
