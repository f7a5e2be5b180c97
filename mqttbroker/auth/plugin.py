"""The types for plug-ins that authenticate clients.

    from mqttbroker.auth.plugin import Accepted, Answer, Ignored, Login, Rejected

    class Devices:
        async def authenticate(self, login: Login) -> Answer:
            ...

The broker runs it in a process of its own: a slow or crashing plug-in delays only the logins that wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Login:
    """A client that asks to be authenticated, with the user name and the password that it claims.

    ``address`` has no port; it is "local" on a Unix socket. ``certificate_name`` is the name in the client's verified
    certificate (`certificate_identity` of the listener); None without one. ``version`` is 3, 4 or 5.
    """

    client_id: str
    username: str | None
    password: bytes | None = field(repr=False)
    address: str
    listener: str
    certificate_name: str | None
    version: int


@dataclass(frozen=True)
class Accepted:
    """The client may connect.

    ``username`` None = the one that it claims; if it claims none, it is anonymous. With a ``client_id`` the client must
    have that one. ``acl`` has the permissions of the login, as a JSON object or list (docs/authentication.md). The
    connection ends at ``expires_at``, in Unix seconds.
    """

    username: str | None = None
    client_id: str | None = None
    acl: Mapping[str, Any] | Sequence[Any] | None = None
    expires_at: float | None = None


@dataclass(frozen=True)
class Rejected:
    """The client may not connect. Wrong user names and passwords lead to bans."""


@dataclass(frozen=True)
class Ignored:
    """Another authenticator decides."""


Answer = Accepted | Rejected | Ignored


class Unavailable(Exception):
    """Raised if the plug-in cannot decide now, with a reason for the log. The client is refused as for any exception."""


class Plugin(Protocol):
    """The methods of a plug-in; it may also have ``async def close(self)``, called before its process ends."""

    async def authenticate(self, login: Login) -> Answer:
        """Decide on a login. Many calls run at the same time; each is cancelled after the timeout."""
        ...
