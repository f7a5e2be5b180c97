"""A TOML file and the files that it includes, as one table in which each key knows its file and line."""

from __future__ import annotations

import errno
import glob
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mqttbroker.config.key_lines import KeyLines

INCLUDE = "include"
MAX_DEPTH = 10  # files that include each other, one in the other
TablePath = tuple[str, ...]


class ConfigError(Exception):
    """``problems`` has one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = [with_user(one_line(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))


def with_user(text: str) -> str:
    """The text; if it says that access was denied, with the user to whom."""
    return f"{text} ({this_user()})" if text.endswith(os.strerror(errno.EACCES)) else text


def this_user() -> str:
    """The user that this process is, for messages."""
    import pwd  # a broker that starts needs none

    uid = os.geteuid()
    try:
        return f"as user {pwd.getpwuid(uid).pw_name}, uid {uid}"
    except KeyError:
        return f"as uid {uid}"


def one_line(text: str) -> str:
    """The text with escapes for line breaks and other characters that are not shown, which values may have."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def dotted(path: TablePath) -> str:
    """A path as text."""
    return ".".join(name if name.isprintable() else json.dumps(name) for name in path)


class ConfigFile:
    """One file. ``former`` has the paths of keys that the file gives by a former name."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read."""
        self.path = path
        self._text = _text(path)
        self.tree = _tree(self._text, path)
        self.former: dict[TablePath, TablePath] = {}
        self._lines: KeyLines | None = None

    def place(self, path: TablePath) -> str:
        """The file and the line of a key, or of the nearest table that it would be in."""
        if self._lines is None:
            self._lines = KeyLines(self._text)
        line = self._lines.of(self.former.get(path, path))
        return f"{self.path}:{line}" if line else str(self.path)


class ConfigFiles:
    """A file with those that it includes.

    An included file overrides the file that includes it, and a later one an earlier one. Tables are merged; the members
    of a list of tables are added. ``prepare`` sees each file before that.
    """

    def __init__(self, path: Path, prepare: Callable[[ConfigFile], None]) -> None:
        """Raises ConfigError if a file cannot be read, or is included twice."""
        self.tree: dict[str, Any] = {}
        self._prepare = prepare
        self._included_at: dict[Path, str] = {}
        # By path of the merged tree: the file that gave it, and its path in this file. For a table, the first file.
        self._origins: dict[TablePath, tuple[ConfigFile, TablePath]] = {}
        self._add(path, "", 0)

    def place(self, path: TablePath) -> str:
        """The file and the line of a key of the merged tree, or of the nearest table that it would be in."""
        rest: TablePath = ()
        while path not in self._origins:
            path, rest = path[:-1], path[-1:] + rest
        file, own = self._origins[path]
        return file.place(own + rest)

    def former_name(self, path: TablePath) -> TablePath:
        """The former name by which a file gives a key; else the name itself."""
        if path not in self._origins:
            return path
        file, own = self._origins[path]
        return path[:-1] + file.former.get(own, own)[-1:]

    def _add(self, path: Path, included_at: str, depth: int) -> None:
        same = Path(os.path.realpath(path))
        if same in self._included_at:
            before = self._included_at[same]
            reason = f"included at {before}, too" if before else "the file that the configuration begins with"
            raise ConfigError([f"{included_at}: {INCLUDE}: {path} is {reason}"])
        if depth > MAX_DEPTH:
            raise ConfigError([f"{included_at}: {INCLUDE}: more than {MAX_DEPTH} files include each other"])
        try:
            file = ConfigFile(path)
        except ConfigError as error:
            raise ConfigError([f"{included_at}: {INCLUDE}: {error}"] if included_at else error.problems) from None
        self._included_at[same] = included_at
        patterns = file.tree.pop(INCLUDE, [])
        self._prepare(file)
        self._origins.setdefault((), (file, ()))
        self._merge(self.tree, file.tree, (), file, ())
        for place, included in _included(file, patterns):
            self._add(included, place, depth + 1)

    def _merge(self, into: dict[str, Any], table: dict[str, Any], at: TablePath, file: ConfigFile, own: TablePath) -> None:
        for name, value in table.items():
            before = into.get(name)
            if isinstance(value, dict) and isinstance(before, dict):
                self._merge(before, value, at + (name,), file, own + (name,))
            elif _is_tables(value) and _is_tables(before) and before is not None:
                for index, item in enumerate(value):
                    self._note(item, at + (name, str(len(before))), file, own + (name, str(index)))
                    before.append(item)
            else:
                into[name] = value
                self._note(value, at + (name,), file, own + (name,))

    def _note(self, value: Any, at: TablePath, file: ConfigFile, own: TablePath) -> None:
        """Note the file of a value and of everything in it."""
        self._origins[at] = (file, own)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, item in items:
            self._note(item, at + (str(name),), file, own + (str(name),))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _included(file: ConfigFile, given: Any) -> Iterator[tuple[str, Path]]:
    """The files that a file includes, each with the place where it does; those of a pattern by name."""
    place = file.place((INCLUDE,))
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not all(isinstance(each, str) and each for each in patterns):
        raise ConfigError([f"{place}: {INCLUDE}: must be a path or a list of paths, with * for any characters"])
    for pattern in patterns:
        if not glob.has_magic(pattern):
            yield place, file.path.parent / pattern
            continue
        directory = file.path.parent / Path(pattern).parent
        if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
            raise ConfigError([f"{place}: {INCLUDE}: {directory} cannot be read"])
        for name in sorted(glob.glob(pattern, root_dir=file.path.parent)):
            yield place, file.path.parent / name


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError([f"{path}:{line}: not UTF-8"]) from None
        reason = error.strerror if isinstance(error, OSError) else ""
        raise ConfigError([f"{path}: cannot be read: {reason or error}"]) from None


def _tree(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also of a number with too many digits
        raise ConfigError([f"{path}: not TOML: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: not TOML: lists or tables are nested too deeply"]) from None
