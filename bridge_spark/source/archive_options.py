"""The options of the source that say how readers reach the archive of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from bridge_spark.log.archive.files import S3Options
from bridge_spark.log.archive.location import parse_location
from bridge_spark.source.archive_reader import ArchiveOptions
from bridge_spark.source.option_values import OptionError

ARCHIVE_SECRETS = ("archive.accessKey", "archive.secretKey", "archive.sessionToken")
ARCHIVE_OPTION_NAMES = ("archive.location", "archive.region", "archive.endpoint", *ARCHIVE_SECRETS)


def archive_options(given: Mapping[str, str]) -> ArchiveOptions:
    """The options among ``given``; raises `OptionError`."""
    location = given.get("archive.location")
    if location is not None:
        try:
            parse_location(location)
        except ValueError as error:
            raise OptionError("archive.location", str(error)) from None
    access, secret, session = (given.get(name) or None for name in ARCHIVE_SECRETS)
    if (access is None) != (secret is None):
        name = "archive.accessKey" if access is None else "archive.secretKey"
        raise OptionError(name, "missing: both keys are needed, or none to use those of the environment")
    if session is not None and access is None:
        raise OptionError("archive.sessionToken", "needs 'archive.accessKey' and 'archive.secretKey'")
    if "@" in given.get("archive.endpoint", ""):
        raise OptionError("archive.endpoint", "must not have credentials: give 'archive.accessKey', 'archive.secretKey'")
    region, endpoint = given.get("archive.region") or None, given.get("archive.endpoint") or None
    return ArchiveOptions(location, S3Options(access, secret, session, region, endpoint))
