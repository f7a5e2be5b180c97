"""The files of an archive, in a directory or in S3.  A file is there as a whole or not at all.

Credentials for S3 come from the environment, `~/.aws` or the machine's role, as in all programs with the SDK of AWS,
unless they are given.  An interrupted multipart upload leaves parts that no reader sees; a lifecycle rule of the bucket
(AbortIncompleteMultipartUpload) removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bridge_spark.log.archive.location import ArchiveLocation
from bridge_spark.log.files import sync_directory, write_all

CONNECT_TIMEOUT_S = 10.0
SOCKET_TIMEOUT_S = 30.0
ATTEMPTS = 5  # of one request to S3, with waits in between that the SDK chooses; also for throttled requests
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
UNFINISHED_SUFFIX = ".unfinished"


class ArchiveError(Exception):
    """The archive cannot be read or written; the text is one line."""


class S3Options(NamedTuple):
    """Settings for S3; the SDK of AWS takes those that are None from its environment."""

    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    region: str | None = None
    endpoint: str | None = None


class ArchiveFiles(Protocol):
    """Paths are those of `ArchiveLocation.path`.  All methods raise `ArchiveError`, and nothing else."""

    def check(self) -> None:
        """Raise `ArchiveError` if the directory or bucket is missing or cannot be reached."""

    def list(self, directory: str) -> dict[str, int]:
        """The sizes of the files in a directory, which may be missing, by name."""

    def size(self, path: str) -> int | None:
        """The size of a file; None if it is missing."""

    def read(self, path: str, position: int, length: int) -> bytes:
        """At most `length` bytes.  Raises `FileNotFoundError` too."""

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        """Create or replace a file.  An error of `parts` passes through, and then the caller must end the process."""

    def remove(self, path: str) -> None:
        """Remove a file, which may be missing."""

    def rename(self, path: str, target: str) -> None:
        """Rename a file."""


def open_files(location: ArchiveLocation, options: S3Options = S3Options()) -> ArchiveFiles:
    """Does not connect, but asks AWS for the region of the bucket if none is given.  Raises `ArchiveError`."""
    return S3Files(location, options) if location.s3 else DirectoryFiles(location.root)


class DirectoryFiles:
    """Files below a directory, which must exist: a missing mount must not become a new directory on another disk."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def check(self) -> None:
        if not self._root.is_dir():
            raise ArchiveError(f"{self._root} is not a directory")

    def list(self, directory: str) -> dict[str, int]:
        try:
            with os.scandir(directory) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            self.check()
            return {}
        except OSError as error:
            raise _error(error) from None

    def size(self, path: str) -> int | None:
        try:
            return os.path.getsize(path)
        except FileNotFoundError:
            self.check()
            return None
        except OSError as error:
            raise _error(error) from None

    def read(self, path: str, position: int, length: int) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                parts = []
                while length and (data := os.pread(file.fileno(), length, position)):
                    parts.append(data)
                    position, length = position + len(data), length - len(data)
                return b"".join(parts)
        except FileNotFoundError:
            self.check()
            raise
        except OSError as error:
            raise _error(error) from None

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        target = Path(path)
        # Programs that read the archive ignore names that begin with a dot.
        unfinished = target.with_name(f".{target.name}.{os.getpid()}{UNFINISHED_SUFFIX}")
        try:
            self._make(target.parent)
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                position = 0
                for part in parts:
                    write_all(fd, part, position)
                    position += len(part)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(unfinished, target)
            sync_directory(target.parent)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise _error(error) from None
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)
            sync_directory(Path(path).parent)
        except FileNotFoundError:
            self.check()
        except OSError as error:
            raise _error(error) from None

    def rename(self, path: str, target: str) -> None:
        try:
            os.rename(path, target)
            sync_directory(Path(target).parent)
        except OSError as error:
            raise _error(error) from None

    def _make(self, directory: Path) -> None:
        self.check()
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            sync_directory(each.parent)


class S3Files:
    """Objects of an S3-compatible storage, by pyarrow."""

    def __init__(self, location: ArchiveLocation, options: S3Options) -> None:
        try:
            import pyarrow.fs as fs  # type: ignore[import-untyped]
        except ImportError:
            raise ArchiveError('S3 needs pyarrow: pip install "mqttbroker[parquet]"') from None
        self._fs = fs
        self._bucket = location.root.partition("/")[0]
        self._last: tuple[str, Any] | None = None  # the file read last: tasks read one file at a time
        given = dict(location.parameters)
        for name, value in (("region", options.region), ("endpoint_override", options.endpoint)):
            if value:
                given[name] = value
        for variable in ENDPOINT_VARIABLES:  # which pyarrow knows in URLs only
            if os.environ.get(variable):
                given.setdefault("endpoint_override", os.environ[variable])
        for scheme in ("http", "https"):
            if given.get("endpoint_override", "").startswith(f"{scheme}://"):
                given["endpoint_override"] = given["endpoint_override"].removeprefix(f"{scheme}://").rstrip("/")
                given["scheme"] = scheme
        if not (given.keys() & {"region", "endpoint_override"} or any(map(os.environ.get, REGION_VARIABLES))):
            with suppress(OSError):
                given["region"] = fs.resolve_s3_region(self._bucket)
        try:
            self._files = fs.S3FileSystem(
                access_key=options.access_key,
                secret_key=options.secret_key,
                session_token=options.session_token,
                connect_timeout=CONNECT_TIMEOUT_S,
                request_timeout=SOCKET_TIMEOUT_S,
                background_writes=False,  # or a large segment would be in memory as a whole
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
                **given,
            )
        except (OSError, ValueError) as error:
            raise _error(error) from None

    def check(self) -> None:
        try:
            found = self._files.get_file_info(self._bucket)
        except OSError as error:
            raise _error(error) from None
        if found.type == self._fs.FileType.NotFound:
            raise ArchiveError(f"there is no bucket {self._bucket!r}")

    def list(self, directory: str) -> dict[str, int]:
        try:
            found = self._files.get_file_info(self._fs.FileSelector(directory, allow_not_found=True))
        except OSError as error:
            raise _error(error) from None
        return {each.base_name: each.size for each in found if each.is_file}

    def size(self, path: str) -> int | None:
        try:
            found = self._files.get_file_info(path)
        except OSError as error:
            raise _error(error) from None
        return int(found.size) if found.is_file else None

    def read(self, path: str, position: int, length: int) -> bytes:
        try:
            if self._last is None or self._last[0] != path:
                self._last = (path, self._files.open_input_file(path))
            return bytes(self._last[1].read_at(length, position))
        except FileNotFoundError:
            raise
        except OSError as error:
            self._last = None
            if "NO_SUCH_KEY" in str(error) or "HTTP status 404" in str(error):
                raise FileNotFoundError(path) from None
            raise _error(error) from None

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        # The stream must be closed only when all parts are written, as closing makes the object.
        try:
            file = self._files.open_output_stream(path)
        except OSError as error:
            raise _error(error) from None
        for part in parts:
            try:
                file.write(part)
            except OSError as error:
                raise _error(error) from None
        try:
            file.close()
        except OSError as error:
            raise _error(error) from None

    def remove(self, path: str) -> None:
        try:
            self._files.delete_file(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _error(error) from None

    def rename(self, path: str, target: str) -> None:
        try:
            self._files.move(path, target)
        except OSError as error:
            raise _error(error) from None


def _error(error: Exception) -> ArchiveError:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return ArchiveError(f"{error.filename}: {error.strerror}")
    return ArchiveError(" ".join(str(error).split()) or type(error).__name__)
