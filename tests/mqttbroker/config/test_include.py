"""Files that a configuration includes: which value wins, places of problems, and loops."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from mqttbroker.config.files import MAX_DEPTH
from mqttbroker.config.load import ConfigError, load_settings
from mqttbroker.config.settings import Settings


def write_files(directory: Path, files: Mapping[str, str]) -> Path:
    """The path of ``broker.toml``."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory / "broker.toml"


def problem(directory: Path, files: Mapping[str, str]) -> str:
    """The one problem of the files, with paths from their directory."""
    with pytest.raises(ConfigError) as caught:
        load_settings(write_files(directory, files))
    (line,) = caught.value.problems
    return line.replace(f"{directory}/", "")


def test_an_included_file_overrides_the_one_that_includes_it_key_by_key(tmp_path: Path) -> None:
    settings = load_settings(write_files(tmp_path, {
        "broker.toml": 'include = "conf.d/*.toml"\ndurability = "off"\n[limits]\nmax_sessions = 1\nmax_inflight = 2\n',
        "conf.d/20-more.toml": "[limits]\nmax_sessions = 20\n",
        "conf.d/10-some.toml": "[limits]\nmax_sessions = 10\nreceive_maximum = 3\n",
        "conf.d/ignored.txt": "x",
        "conf.d/.hidden.toml": "x",
    }))  # fmt: skip
    limits = settings.limits
    assert (limits.max_sessions, limits.max_inflight, limits.receive_maximum) == (20, 2, 3)
    assert settings.durability == "off"
    places = {key: place.replace(f"{tmp_path}/", "") for key, place in settings.sources.items()}
    assert places == {
        "durability": "broker.toml:2",
        "limits.max_sessions": "conf.d/20-more.toml:2",
        "limits.max_inflight": "broker.toml:5",
        "limits.receive_maximum": "conf.d/10-some.toml:3",
    }


def test_listeners_and_streams_of_all_files_count(tmp_path: Path) -> None:
    path = write_files(tmp_path, {
        "broker.toml": 'include = ["more.toml"]\n[[listeners]]\nport = 1\n[streams.a]\nfilters = ["a"]\npartitions = 2\n',
        "more.toml": '[[listeners]]\nport = 2\n[streams.a]\nfilters = ["b"]\n[streams.c]\nfilters = ["c"]\n',
    })  # fmt: skip
    settings = load_settings(path, {"MQTTBROKER_LISTENERS__1__MAX_CONNECTIONS": "7"}, {"--port": "3"})
    assert [(one.port, one.max_connections) for one in settings.listeners] == [(3, None), (2, 7)]
    assert [(one.name, one.filters, one.partitions) for one in settings.streams] == [("a", ("b",), 2), ("c", ("c",), 4)]
    assert settings.sources["listeners.1.port"].endswith("more.toml:2")


def test_a_pattern_without_files_includes_none(tmp_path: Path) -> None:
    assert load_settings(write_files(tmp_path, {"broker.toml": 'include = "conf.d/*.toml"'})) == Settings()


PROBLEMS = [
    ({"broker.toml": '\ninclude = "x.toml"'}, "broker.toml:2: include: x.toml: cannot be read: No such file or directory"),
    ({"broker.toml": 'include = "sub"', "sub/x": ""}, "broker.toml:1: include: sub: cannot be read: Is a directory"),
    ({"broker.toml": 'include = "a.toml"', "a.toml": "b = = 1"},
     "broker.toml:1: include: a.toml: not TOML: Invalid value (at line 1, column 5)"),
    ({"broker.toml": 'include = "*.toml"'},
     "broker.toml:1: include: broker.toml is the file that the configuration begins with"),
    ({"broker.toml": 'include = "a.toml"', "a.toml": '\ninclude = "b.toml"', "b.toml": 'include = "./a.toml"'},
     "b.toml:1: include: a.toml is included at broker.toml:1, too"),
    ({"broker.toml": 'include = ["a.toml", "*.toml"]', "a.toml": ""},
     "broker.toml:1: include: a.toml is included at broker.toml:1, too"),
    ({"broker.toml": "include = 1"}, "broker.toml:1: include: must be a path or a list of paths, with * for any characters"),
    ({"broker.toml": 'include = [""]'},
     "broker.toml:1: include: must be a path or a list of paths, with * for any characters"),
    ({"broker.toml": '[limits]\ninclude = "a.toml"'},
     "broker.toml:2: limits.include: only a file can include others, in front of its first [table]"),
    ({"broker.toml": 'include = "a.toml"\n[limits]\nmax_sessions = 1', "a.toml": "\n[limits]\nmax_sesions = 2"},
     "a.toml:3: limits.max_sesions: unknown key, did you mean max_sessions?"),
    ({"broker.toml": 'include = "a.toml"\n[[listeners]]\nport = 7', "a.toml": "[[listeners]]\nport = 1\n[[listeners]]\nport = -1"},
     "a.toml:4: listeners.2.port: must be 0–65535, got -1"),
    ({"broker.toml": 'include = "a.toml"', "a.toml": "limits.crowded_queue_wait = 1"},
     'a.toml:1: limits.crowded_queue_wait: must be a duration like "500ms", "10s", "5m", "12h" or "7d", got 1'),
    ({"broker.toml": 'include = "a.toml"', "a.toml": "[streams.x]\npartitions = 2"},
     "a.toml:1: streams.x.filters: is required"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "line"), PROBLEMS)
def test_a_problem_names_file_and_line(tmp_path: Path, files: dict[str, str], line: str) -> None:
    assert problem(tmp_path, files) == line


def test_files_are_included_to_a_depth(tmp_path: Path) -> None:
    files = {f"{number}.toml": f'include = "{number + 1}.toml"' for number in range(MAX_DEPTH + 1)}
    files["broker.toml"] = 'include = "0.toml"'
    assert problem(tmp_path, files) == (f"{MAX_DEPTH - 1}.toml:1: include: more than {MAX_DEPTH} files include each other")


def test_a_variable_cannot_include(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MQTTBROKER_INCLUDE: include: only a file can include others"):
        load_settings(None, {"MQTTBROKER_INCLUDE": "x.toml"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_a_directory_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    directory = tmp_path / "conf.d"
    directory.mkdir(mode=0o300)
    try:
        assert problem(tmp_path, {"broker.toml": 'include = "conf.d/*.toml"'}) == ("broker.toml:1: include: conf.d cannot be read")
    finally:
        directory.chmod(0o700)


def test_former_names_in_an_included_file_are_overridden_as_others(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = write_files(tmp_path, {
        "broker.toml": 'include = "a.toml"\nlimits.backpressure_wait = "1s"',
        "a.toml": 'limits.crowded_queue_wait = "2s"',
    })  # fmt: skip
    assert load_settings(path, warn=warnings.append).limits.backpressure_wait == 2.0
    assert warnings == [f"{tmp_path}/a.toml:1: limits.crowded_queue_wait: is called limits.backpressure_wait now"]
