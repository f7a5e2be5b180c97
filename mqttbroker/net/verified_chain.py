"""The certificates of a client, as OpenSSL has verified them."""

from __future__ import annotations

from typing import Any

_ENCODING_DER = 2  # `_ssl.ENCODING_DER`


def verified_chain(ssl_object: Any) -> list[bytes]:
    """The client's certificate and those of its authorities, in DER; empty without one, and in a resumed session."""
    if hasattr(ssl_object, "get_verified_chain"):  # Python 3.13
        return list(ssl_object.get_verified_chain())
    return [one.public_bytes(_ENCODING_DER) for one in ssl_object._sslobj.get_verified_chain() or ()]
