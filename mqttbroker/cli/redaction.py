"""Takes secrets out of texts for others: those that are known, and what looks like one; and names of clients on request."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from mqttbroker.config.in_force import MASK, SECRETS, flatten
from mqttbroker.config.load import ENVIRONMENT_PREFIX
from mqttbroker.config.settings import Settings

SHORTEST = 4  # characters of a secret that is searched for: a shorter one is a part of too many words
MAX_FILE_BYTES = 1 << 18  # of a file with secrets that are searched for
MAX_FILE_LINES = 200  # of it; a private key has 60, and `_PATTERNS` know the hashes of a password file
_SECRET_FILES = ("keyfile", "link_keyfile", "key_file", "jwks_file")
_SECRET_MEMBERS = ("k", "d", "p", "q", "dp", "dq", "qi")  # of a JWK
_SECRET_VARIABLE = re.compile(r"PASS|SECRET|TOKEN|CREDENTIAL|API_?KEY|PRIVATE|AUTHORIZATION|COOKIE", re.I)


def _masked_value(match: re.Match[str]) -> str:
    quotes = re.match(r"\\?[\"']", match[3])
    return f"{match[1]}{match[2]}{quotes[0]}{MASK}{quotes[0]}" if quotes else f"{match[1]}{match[2]}{MASK}"


# Texts that look like secrets, and their replacements. Clients choose parts of what is searched, so each repetition in front of a
# character that must follow is bounded: else a long name without that character would take time that grows with its square.
_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), MASK),
    (re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s\"'<>]{0,1024}@"), rf"\1{MASK}@"),
    (re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'<>?]{0,1024}\?)[^\s\"'<>]+"), rf"\1{MASK}"),
    (re.compile(r"\$(?:argon2(?:id|i|d)|scram-sha-256|pbkdf2-sha512|[1567]|2[abxy])\$[^\s\"',]+"), MASK),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)*"), MASK),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.I), rf"\1 {MASK}"),
    # In JSON inside a text, quotes are escaped.
    (re.compile(r"(?<![A-Za-z0-9])(password|passwd|pw|secret|token|api[_-]?key|authorization|cookie)(\\?[\"']?\s*[=:]\s*)"
                r"(?!null\b|None\b|true\b|false\b|\*\*\*|\"\*\*\*|\"\"|\"\$\{)"
                r"(\\\"(?:[^\\\"]|\\[^\"])*\\\"|\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;}\]\"']+)", re.I), _masked_value),
)  # fmt: skip

_NAMES = "client|client_id|clientid|user|username|topic|filter|topic_filter"
_NAME_FIELD = re.compile(rf"(\b(?:{_NAMES})=(?!\")|(?:\b(?:{_NAMES})=|\"(?:{_NAMES})\": )(?=\"))(\"(?:[^\"\\]|\\.)*\"|[^\s,}}]+)")
_ADDRESS = re.compile(r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4})(?![\w.]*\w)")
_WORD = re.compile(r"[^\s\"'=,;()\[\]{}<>]+")
_MAX_COMPOSED = 200
_PUBLIC_ADDRESSES = ("127.0.0.1", "0.0.0.0", "::1", "::")  # which say nothing about anyone
_NOT_NAMES = ('""',)


class Redactor:
    """Cleans texts. Add all secrets and names before the first `clean`."""

    def __init__(self, anonymize: bool) -> None:
        self.anonymize = anonymize
        self.too_short = 0  # secrets that are not searched for
        self._secrets: set[str] = set()
        self._names: set[str] = set()
        self._composed: set[str] = set()  # names that are not one `_WORD`
        self._key = os.urandom(32)  # so that tags of two bundles cannot be compared
        self._in_order: list[str] = []

    def add_secret(self, value: str) -> None:
        """Never show this value, nor its forms in JSON, URLs and Base64."""
        scheme, _, credentials = value.partition(" ")
        for text in {value, credentials if scheme.lower() in ("bearer", "basic") else value}:
            if len(text) < SHORTEST:
                self.too_short += text == value and bool(text)
                continue
            encoded = b64encode(text.encode(errors="surrogateescape")).decode().rstrip("=")
            self._secrets |= {
                text,
                json.dumps(text)[1:-1],
                json.dumps(text, ensure_ascii=False)[1:-1],
                quote(text),
                quote(text, safe=""),
                encoded,
            }

    def add_name(self, value: str) -> None:
        """Show a tag in the place of this name, if names are anonymized."""
        if len(value) < SHORTEST:
            return
        if _WORD.fullmatch(value) and not value.endswith((".", ":")):
            self._names.add(value)
        elif len(self._composed) < _MAX_COMPOSED:
            self._composed.add(value)

    def learn(self, text: str) -> None:
        """Find the names in the fields of a log or of an answer of the API, so that they are replaced everywhere."""
        if self.anonymize:
            for _, value in _NAME_FIELD.findall(text):
                if value not in _NOT_NAMES:
                    self.add_name(value.strip('"'))

    def clean(self, text: str) -> str:
        """The text without secrets, and with tags for names and addresses if they are anonymized."""
        if len(self._in_order) != len(self._secrets):
            self._in_order = sorted(self._secrets, key=len, reverse=True)
        for secret in self._in_order:
            text = text.replace(secret, MASK)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        if self.anonymize:
            text = _NAME_FIELD.sub(self._field, text)
            for name in self._composed:
                text = text.replace(name, self._tag("name", name))
            text = _WORD.sub(self._word, text)
            text = _ADDRESS.sub(self._address, text)
        return text

    def _word(self, match: re.Match[str]) -> str:
        word = match[0].rstrip(".:")
        return self._tag("name", word) + match[0][len(word) :] if word in self._names else match[0]

    def _address(self, match: re.Match[str]) -> str:
        try:
            ip_address(match[0])
        except ValueError:
            return match[0]
        return match[0] if match[0] in _PUBLIC_ADDRESSES else self._tag("address", match[0])

    def _field(self, match: re.Match[str]) -> str:
        if match[2] in _NOT_NAMES:
            return match[0]
        tag = self._tag("name", match[2].strip('"'))
        return match[1] + (f'"{tag}"' if match[2].startswith('"') else tag)

    def _tag(self, kind: str, value: str) -> str:
        return f"{kind}-{hmac.new(self._key, value.encode(errors='replace'), hashlib.sha256).hexdigest()[:10]}"


def secrets_of(settings: Settings) -> Iterator[str]:
    """The secrets of a configuration, those in the files that it names included."""
    for key, value in flatten(settings).items():
        name = key.rpartition(".")[2]
        if key == "http.access":
            yield from (access.token for access in value if access.token is not None)
        elif name in SECRETS:
            yield from _strings(value)
        elif name in _SECRET_FILES and isinstance(value, Path):
            yield from _in_file(value)
        elif isinstance(value, str) and "://" in value:
            yield from _in_url(value)


def secrets_in_tree(tree: Any) -> Iterator[str]:
    """The secrets of a TOML file that may not be a valid configuration."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name in SECRETS:
                yield from _strings(value)
            elif isinstance(value, str) and (name in _SECRET_FILES or name.removesuffix("_file") in SECRETS):
                yield from _in_file(Path(value))
            else:
                yield from secrets_in_tree(value)
    elif isinstance(tree, list):
        for item in tree:
            yield from secrets_in_tree(item)
    elif isinstance(tree, str) and "://" in tree:
        yield from _in_url(tree)


def secrets_in_environment(variables: Mapping[str, str]) -> Iterator[str]:
    """The values of variables whose names say that they are secret, and what URLs in others hold."""
    for name, value in variables.items():
        ours = name.startswith(ENVIRONMENT_PREFIX) and name.rpartition("__")[2].lower() in SECRETS
        if ours or (_SECRET_VARIABLE.search(name) and not name.upper().endswith(("_FILE", "_PATH", "_DIR"))):
            yield from _strings(value)
        elif "://" in value:
            yield from _in_url(value)


def _strings(value: Any) -> Iterator[str]:
    """The strings of a value; of a text in JSON those inside it, too."""
    if isinstance(value, str):
        yield value
        if value.lstrip().startswith(("{", "[")):
            try:
                yield from _strings(json.loads(value))
            except ValueError:
                pass
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Iterable) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)


def _in_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        yield from filter(None, (parts.password, parts.netloc.rpartition("@")[0].partition(":")[2]))
        yield from (value for _, value in parse_qsl(parts.query))
    except ValueError:
        return


def _in_file(path: Path) -> Iterator[str]:
    """The lines of a key, or the secret members of a set of JSON Web Keys."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return
    try:
        yield from _members(json.loads(text))
    except ValueError:
        yield from (line for line in text.splitlines()[:MAX_FILE_LINES] if not line.startswith("-----"))


def _members(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item) if name in _SECRET_MEMBERS else _members(item)
    elif isinstance(value, list):
        for item in value:
            yield from _members(item)
