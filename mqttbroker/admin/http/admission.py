"""Admits requests to the HTTP server by their credentials, and bans addresses that send wrong ones.

An address is banned as one that fails to log in with MQTT (`Bans`), for as long, but by counts of its own.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mqttbroker.admin.http.access import AccessList, Principal, Right, role_for
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.core.access.bans import Bans
from mqttbroker.net.tls import ListenerContext
from mqttbroker.net.wire import peer_text

if TYPE_CHECKING:
    from aiohttp import web

    from mqttbroker.admin.http.routes import Route

audit = logging.getLogger("mqttbroker.audit")


class RequestAdmission:
    """Finds the sender of each request, and whether it has the right for it.

    ``access`` and ``context``, the present certificates and authorities, may be replaced by any thread. ``clock``
    returns monotonic time in seconds.
    """

    def __init__(self, access: AccessList, context: ListenerContext | None, bans: Bans, clock: Callable[[], float]) -> None:
        self.context = context
        self.access = access
        self.bans = bans
        self._clock = clock

    def admit(self, request: web.Request) -> Principal:
        """The sender of a request.

        Raises RequestError: 401 without known credentials, 403 for another site's web page, 429 for a banned address.
        """
        access = self.access
        if "Authorization" not in request.headers:
            _check_origin(request)
        if access.anonymous is not None:
            _check_host(request)
            return access.anonymous
        peer, now = address_of(request), self._clock()
        if self.bans.refuses(peer, None, now):
            raise RequestError(429, "too many wrong tokens from this address")
        found = self._known(request)
        if found is None:
            if "Authorization" in request.headers:
                self.bans.failed(peer, None, now)
            raise RequestError(401, "a bearer token is needed, or a client certificate that has a role")
        if "Authorization" in request.headers:
            self.bans.succeeded(peer, found.name)
        return found

    def _known(self, request: web.Request) -> Principal | None:
        header = request.headers.get("Authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer":
                return None
            return self.access.of_token(token.strip().encode(errors="surrogateescape"))
        transport = request.transport
        ssl_object: Any = None if transport is None else transport.get_extra_info("ssl_object")
        certificate = None if ssl_object is None else ssl_object.getpeercert()
        if not certificate:
            return None
        if self.context is None or ssl_object.context is not self.context:
            raise RequestError(401, "authorities were read again: open a new connection")
        refusal = self.context.refusal(ssl_object, datetime.now(UTC))
        if refusal is not None:
            raise RequestError(401, refusal)
        return self.access.of_certificate(certificate)

    def authorize(self, principal: Principal, route: Route) -> None:
        """Raises RequestError, 403, if the sender has not the right that a route needs."""
        if route.right is None or route.right in principal.rights:
            return
        if self.access.anonymous is not None:
            raise RequestError(403, f"{_needed(route.right)}: set http.token, or [[http.access]], and send a token")
        raise RequestError(403, f"{_needed(route.right)}; {principal.name} has {principal.role}")


def _needed(right: Right) -> str:
    return f"role {role_for(right)} is needed"


def _check_origin(request: web.Request) -> None:
    """Refuse a request without token from a web page of another site: a browser adds its user's client certificate."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
        raise RequestError(403, "a web page of another site needs a token")


def _check_host(request: web.Request) -> None:
    """Refuse a request without credentials whose Host is a domain name, which a web page may have pointed to loopback.

    A name without a dot is no domain of the Internet.
    """
    host = request.url.host or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if "." in host and not host.endswith(".localhost"):
            raise RequestError(421, "without a token, the host must be an address or localhost") from None


def log_action(action: str, target: str, request: web.Request, principal: Principal) -> None:
    """Add an act of an operator to the audit log."""
    audit.info(
        "event=admin action=%s target=%s user=%s role=%s address=%s listener=%s",
        action,
        target,
        principal.name,
        principal.role,
        address_of(request),
        "http",
    )


def address_of(request: web.Request) -> str:
    """The address and port of a request's sender."""
    transport = request.transport
    return "" if transport is None else peer_text(transport.get_extra_info("peername"))
