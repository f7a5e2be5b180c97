"""The name of a client in its certificate, as `ssl.SSLSocket.getpeercert` gives certificates.

``{"subject": ((("commonName", "pump-7"),),), "subjectAltName": (("DNS", "pump-7.example.org"),)}``
"""

from __future__ import annotations

from typing import Any, Final

CN: Final = "cn"
SUBJECT: Final = "subject"
_ALTERNATIVES: Final[dict[str, str]] = {"san_dns": "DNS", "san_uri": "URI", "san_email": "email"}

# RFC 4514, section 3, and OpenSSL's short names.
_SHORT_NAMES: Final[dict[str, str]] = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
    "givenName": "GN",
    "surname": "SN",
}


def certificate_name(certificate: Any, kinds: tuple[str, ...]) -> str | None:
    """The first name of these kinds that the certificate has; None if it has none, or one that is no MQTT string.

    ``kinds`` are "cn" (the last common name), "subject" (the whole subject as in RFC 4514) and the first alternative
    name of a type: "san_dns", "san_uri", "san_email".
    """
    for kind in kinds:
        if kind == CN:
            found = _common_name(certificate)
        elif kind == SUBJECT:
            found = _subject(certificate)
        else:
            found = _alternative_name(certificate, _ALTERNATIVES[kind])
        if found:
            return found if _is_usable(found) else None
    return None


def _common_name(certificate: Any) -> str:
    found: str = ""
    for relative_name in certificate.get("subject", ()):
        for key, value in relative_name:
            if key == "commonName" and value:
                found = value
    return found


def _alternative_name(certificate: Any, kind: str) -> str:
    for key, value in certificate.get("subjectAltName", ()):
        if key == kind and value:
            found: str = value
            return found
    return ""


def _subject(certificate: Any) -> str:
    relative_names: list[str] = []
    for relative_name in certificate.get("subject", ()):
        parts: list[str] = []
        for key, value in relative_name:
            parts.append(_SHORT_NAMES.get(key, key) + "=" + _escaped(value))
        relative_names.append("+".join(parts))
    relative_names.reverse()  # RFC 4514, section 2.1
    return ",".join(relative_names)


def _escaped(value: str) -> str:
    """RFC 4514, section 2.4."""
    parts: list[str] = []
    last = len(value) - 1
    for index, char in enumerate(value):
        if char in ',+"\\<>;' or (char == " " and (index == 0 or index == last)) or (char == "#" and index == 0):
            parts.append("\\")
        parts.append(char)
    return "".join(parts)


def _is_usable(name: str) -> bool:
    """Whether a user name or client id may be so: no control characters [MQTT-1.5.4-2], and not too long."""
    for char in name:
        if char < " " or "\x7f" <= char <= "\x9f":
            return False
    try:
        return len(name.encode("utf-8")) <= 65535
    except UnicodeEncodeError:
        return False
