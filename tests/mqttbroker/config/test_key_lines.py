"""The lines in which the keys of a configuration are."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.config.key_lines import KeyLines

TEXT = '''# a comment
a = 1
b.c = """
[d]
e = 5
"""
f = [
  1,
  2,
]
[limits]   # a comment
max = "x"
"quoted key" = { inner = 1 }

[[listeners]]
port = 1
[[listeners]]
port = 2
[[http.access]]
name = "a"
[[http.access]]
name = "b"
[streams.s]
filters = ["a"]
'''


def test_keys_have_lines() -> None:
    lines = KeyLines(TEXT)
    expected = {
        "a": 2, "b.c": 3, "b": 3, "f": 7, "f.1": 7, "limits": 11, "limits.max": 12, "limits.quoted key.inner": 13,
        "limits.missing": 11, "listeners.0.port": 16, "listeners.1.port": 18, "listeners.1.missing": 17,
        "http.access.0.name": 20, "http.access.1.name": 22, "streams.s.filters": 24, "streams.s.x.y": 23,
        "missing": 0, "e": 0,
    }  # fmt: skip
    assert {path: lines.of(tuple(path.split("."))) for path in expected} == expected


def test_a_table_below_a_member_of_a_list_belongs_to_the_last_one() -> None:
    lines = KeyLines("[[a]]\n[[a]]\n[a.b]\nc = 1\n")
    assert lines.of(("a", "1", "b", "c")) == 4 and lines.of(("a", "0")) == 1


def test_an_invalid_text_has_the_lines_before_the_mistake() -> None:
    lines = KeyLines("a = 1\nb = = 2\nc = 3\n")
    assert (lines.of(("a",)), lines.of(("c",))) == (1, 0)


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["1", '"x"', "[\n1,\n]", '"""\na = 5\n[b]\n"""', "{x = 1}", "'''\n\n'''"])


@given(st.lists(st.one_of(st.tuples(NAMES, VALUES), NAMES, st.just("# comment")), max_size=12))
def test_each_value_is_at_its_line(parts: list[object]) -> None:
    """Keys of generated texts: the value of a key, alone from its line on, is that in the whole text."""
    text = ""
    for part in parts:
        text += f"{part[0]} = {part[1]}\n" if isinstance(part, tuple) else f"[[{part}]]\n" if part in "abc" else f"{part}\n"
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = KeyLines(text)
    rows = text.split("\n")
    for name, value in tree.items():
        tables = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
        if tables is None:
            assert rows[lines.of((name,)) - 1].startswith(f"{name} = ")
            continue
        for index, table in enumerate(tables):
            start = lines.of((name, str(index)))
            assert rows[start - 1] == f"[[{name}]]"
            for inner in table:
                line = lines.of((name, str(index), inner))
                assert line > start and rows[line - 1].startswith(f"{inner} = ")
