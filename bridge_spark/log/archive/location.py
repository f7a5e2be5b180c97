"""The location of an archive: `s3://BUCKET/PREFIX` or a directory.

`<location>/<stream>/<partition>/<first offset>-<end offset>.parquet`, offsets in 20 digits, is an archived segment: a
sealed segment as it was in the data directory.  `<location>/<stream>/_archive.json` names the stream that writes there.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

OWNER_FILE = "_archive.json"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
S3_PARAMETERS = ("region", "scheme", "endpoint_override")


class ArchiveLocation(NamedTuple):
    """``root`` is an absolute directory, or bucket and prefix if ``s3``.  ``parameters`` are those of an S3 URL."""

    s3: bool
    root: str
    parameters: dict[str, str]

    def __str__(self) -> str:
        if not self.s3:
            return self.root
        query = f"?{urlencode(self.parameters)}" if self.parameters else ""
        return f"s3://{quote(self.root)}{query}"

    def path(self, stream: str, *names: str) -> str:
        """The path of a stream's directory, or of a file below it."""
        return "/".join((self.root, stream, *names))


def parse_location(text: str) -> ArchiveLocation:
    """Raises `ValueError` with the reason for a text that is not a location."""
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError("must name a directory of this machine, like file:///srv/archive")
        return _directory(unquote(parts.path))
    if parts.scheme != "s3":
        if "://" in text or not text.startswith("/"):
            raise ValueError('must be "s3://BUCKET/PREFIX" or the absolute path of a directory')
        return _directory(text)
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not have credentials: they come from the environment or ~/.aws")
    if _BUCKET.fullmatch(parts.netloc) is None:
        raise ValueError("must name a bucket, like s3://BUCKET/PREFIX")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in parameters.items():
        if name not in S3_PARAMETERS or not value:
            known = ", ".join(S3_PARAMETERS)
            raise ValueError(f"has the parameter {name!r}, or no value for it; those of S3 are {known}")
    if "@" in parameters.get("endpoint_override", ""):
        raise ValueError("must not have credentials in endpoint_override: they come from the environment or ~/.aws")
    if parameters.get("scheme", "https") not in ("http", "https"):
        raise ValueError("must have http or https as scheme")
    if parts.fragment:
        raise ValueError("must not have a #")
    levels = [level for level in unquote(parts.path).split("/") if level]
    return ArchiveLocation(True, "/".join([parts.netloc, *_checked(levels)]), parameters)


def _directory(path: str) -> ArchiveLocation:
    levels = [level for level in path.split("/") if level]
    if not levels:
        raise ValueError("must not be the root directory")
    return ArchiveLocation(False, "/" + "/".join(_checked(levels)), {})


def _checked(levels: list[str]) -> list[str]:
    if ".." in levels or "." in levels:
        raise ValueError("must not have . or .. in its path")
    if not all(map(str.isprintable, levels)):
        raise ValueError("must not have control characters in its path")
    return levels
