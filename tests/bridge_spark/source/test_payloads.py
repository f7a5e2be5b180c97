"""Payload parsing without Spark: the result of each payload, and that `fast` equals `one`."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_spark.source.json_payloads import JsonParser
from bridge_spark.source.payload_options import PayloadOptionError, PayloadOptions, payload_options
from bridge_spark.source.payload_reader import PARSED_BYTES, ROWS_BYTES, PayloadReader, PayloadSchemaError
from bridge_spark.source.row_parser import BadPayload, Refused, RowParser
from bridge_spark.source.text_payloads import CsvParser, NumberParser
from bridge_spark.source.topic_levels import PatternError, parse_pattern

pytestmark = pytest.mark.one_build

INSTANT = pa.timestamp("us", "UTC")
RECORD = pa.struct(
    [
        pa.field("n", pa.int64(), False),
        pa.field("b", pa.int8()),
        pa.field("d", pa.float64()),
        pa.field("f", pa.float32()),
        pa.field("s", pa.string()),
        pa.field("k", pa.bool_()),
        pa.field("t", INSTANT),
        pa.field("p", pa.timestamp("us")),
        pa.field("day", pa.date32()),
        pa.field("m", pa.decimal128(5, 2)),
        pa.field("x", pa.binary()),
        pa.field("o", pa.struct([pa.field("a", pa.int64(), False), pa.field("u", pa.string()), pa.field("t", INSTANT)])),
        pa.field("l", pa.list_(pa.float32())),
        pa.field("q", pa.list_(pa.struct([pa.field("i", pa.int32(), False)]))),
    ]
)
MAPS = pa.struct([pa.field("n", pa.int64()), pa.field("m", pa.map_(pa.string(), pa.int32()))])
FLAT = pa.struct([field for field in RECORD if not pa.types.is_nested(field.type)])


def slow(parser: RowParser, payloads: list[bytes]) -> list[tuple[int, str, str | None]]:
    """The results of `RowParser.one`: (payload, repr of the value, reason)."""
    rows: list[tuple[int, Any, str | None]] = []
    for number, payload in enumerate(payloads):
        try:
            rows += [(number, value, None) for value in parser.one(payload)]
        except BadPayload as bad:
            rows.append((number, None, str(bad)))
    values = pa.array([value for _, value, _ in rows], parser.type).to_pylist()
    return [(number, repr(value), reason) for (number, _, reason), value in zip(rows, values)]


def parsed(parser: RowParser, payloads: list[bytes]) -> list[tuple[int, str, str | None]]:
    """The results of `RowParser.parse`, in the same form."""
    found = parser.parse(pa.array(payloads, pa.binary()))
    found.values.validate(full=True)
    assert found.values.type == parser.type
    numbers = range(len(payloads)) if found.payloads is None else found.payloads.to_pylist()
    assert len(found.values) == len(found.reasons) == len(numbers)
    return list(zip(numbers, map(repr, found.values.to_pylist()), found.reasons.to_pylist()))


def is_fast(parser: RowParser, payload: bytes) -> bool:
    try:
        parser.fast(pa.array([payload], pa.binary()))
    except Refused:
        return False
    return True


# --- JSON: the result of each payload -------------------------------------------------------------------------------

GOOD = '"n": 1'
JSON: list[tuple[bytes, object]] = [
    (b"", "empty payload"),
    (b" \n", "empty payload"),
    (b"\xef\xbb\xbf", "empty payload"),
    (b"{", "not JSON"),
    (b"}", "not JSON"),
    (b'{"n": 1,}', "not JSON"),
    (b"{'n': 1}", "not JSON"),
    (b'{"n": 1} x', "text after the JSON value"),
    (b'{"n": 1}{"n": 2}', "text after the JSON value"),
    (b'{"n": 1}\n{"n": 2}', "text after the JSON value"),
    (b'{"n": 1}\0', "text after the JSON value"),
    (b'{"n": 1 /* one */}', "not JSON"),
    (b'{"n": 1, "z": NaN}', "not JSON"),
    (b'{"n": 1, "z": -Infinity}', "not JSON"),
    (b'{"n": 1, "z": "\xff"}', "not UTF-8"),
    (b'{"n": 1, "s": "\\ud800"}', "not JSON"),
    (b'{"n": 1, "s": "a\tb"}', "not JSON"),
    (b"1", "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'[{"n": 1}]', "not a JSON object"),
    (b"{}", "field 'n' is missing"),
    (b'{"N": 1}', "field 'n' is missing"),
    (b'{"n": null}', "field 'n' is missing"),
    (b'{"n": 1, "n": 1}', "field 'n' stands twice"),
    (b'{"n": 1, "o": {"a": 1, "a": 2}}', "field 'o.a' stands twice"),
    (b'{"n": 1.0}', "field 'n' is not a whole number"),
    (b'{"n": 1e3}', "field 'n' is not a whole number"),
    (b'{"n": "1"}', "field 'n' is not a number"),
    (b'{"n": true}', "field 'n' is not a number"),
    (b'{"n": 9223372036854775808}', "field 'n' does not fit int64"),
    (b'{"n": 1, "b": -129}', "field 'b' does not fit int8"),
    (b'{"n": 1, "d": 1e999}', "field 'd' is not a finite number"),
    (b'{"n": 1, "f": 1e39}', "field 'f' is not a finite number"),
    (b'{"n": 1, "k": 1}', "field 'k' is neither true nor false"),
    (b'{"n": 1, "x": "aGk"}', "field 'x' is not base64"),
    (b'{"n": 1, "m": 1.255}', "field 'm' does not fit decimal(5,2)"),
    (b'{"n": 1, "m": 1000}', "field 'm' does not fit decimal(5,2)"),
    (b'{"n": 1, "t": 1700000000}', "field 't' is not a text"),
    (b'{"n": 1, "t": "noon"}', "field 't' is not a timestamp"),
    (b'{"n": 1, "p": "2026-01-31T12:00:00Z"}', "field 'p' is not a timestamp"),
    (b'{"n": 1, "day": "2026-02-29"}', "field 'day' is not a date"),
    (b'{"n": 1, "o": []}', "field 'o' is not an object"),
    (b'{"n": 1, "o": {}}', "field 'o.a' is missing"),
    (b'{"n": 1, "l": {}}', "field 'l' is not an array"),
    (b'{"n": 1, "l": ["1"]}', "field 'l[]' is not a number"),
    (b'{"n": 1, "q": [{}]}', "field 'q[].i' is missing"),
    (b'{"n":' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
    (b"[" * 201 + b'"' + b'\\"' * 500_000, "nested too deeply"),  # in time that grows with its length only
    (b"[" * 201 + b'"' + b'\\"' * 500_000 + b"\\", "nested too deeply"),
    (b'\xef\xbb\xbf {"n" :\n1}\r\n', {"n": 1}),
    (b'{"n": -0}', {"n": 0}),
    (b'{"\\u006e": 1}', {"n": 1}),
    (b'{"n": 1, "z": {"y": [1, {}]}, "z": 2}', {"n": 1}),
    (b'{"n": 1, "z": ' + b"[" * 199 + b"]" * 199 + b"}", {"n": 1}),
    (b'{"n": 1, "s": "' + b"[" * 300 + b'"}', {"n": 1, "s": "[" * 300}),
    (b'{"n": 1, "s": 1.50}', {"n": 1, "s": "1.50"}),
    (b'{"n": 1, "s": true}', {"n": 1, "s": "true"}),
    (b'{"n": 1, "s": {"a": [1.0, null]}}', {"n": 1, "s": '{"a":[1.0,null]}'}),
    (b'{"n": 1, "s": ""}', {"n": 1, "s": ""}),
    (b'{"n": 1, "s": "\\ud83d\\ude00"}', {"n": 1, "s": "\U0001f600"}),
    (b'{"n": 1, "d": 1}', {"n": 1, "d": 1.0}),
    (b'{"n": 1, "m": 1.5}', {"n": 1, "m": "1.50"}),
    (b'{"n": 1, "m": "1.25"}', {"n": 1, "m": "1.25"}),
    (b'{"n": 1, "t": "2026-01-31T12:00:00Z"}', {"n": 1, "t": "2026-01-31 12:00:00+00:00"}),
    (b'{"n": 1, "t": "2026-01-31 12:00"}', {"n": 1, "t": "2026-01-31 12:00:00+00:00"}),
    (b'{"n": 1, "t": "2026-01-31T12:00:00.1234567+02:30"}', {"n": 1, "t": "2026-01-31 09:30:00.123456+00:00"}),
    (b'{"n": 1, "p": "2026-01-31T12:00:00"}', {"n": 1, "p": "2026-01-31 12:00:00"}),
    (b'{"n": 1, "x": "aGk="}', {"n": 1, "x": b"hi"}),
    (b'{"n": 1, "day": "2024-02-29"}', {"n": 1, "day": "2024-02-29"}),
    (b'{"n": 1, "o": {"a": 2, "z": 0}, "l": [1, null], "q": []}', {"n": 1, "o": {"a": 2, "u": None, "t": None}, "l": [1.0, None], "q": []}),
]


@pytest.mark.parametrize("way", ["slow", "fast"])
def test_json_becomes_a_row_or_a_reason(way: str) -> None:
    parser = JsonParser(RECORD)
    read = parsed if way == "fast" else slow
    for payload, expected in JSON:
        [(_, value, reason)] = read(parser, [payload])
        if isinstance(expected, str):
            assert (value, reason) == ("None", expected), payload
        else:
            row = dict.fromkeys((field.name for field in RECORD), None) | expected  # type: ignore[operator]
            found = parser.parse(pa.array([payload], pa.binary())).values[0].as_py()
            plain = {
                name: value if value is None or isinstance(value, (bool, int, float, str, bytes, list, dict)) else str(value)
                for name, value in found.items()
            }
            assert (plain, reason) == (row, None), payload


@pytest.mark.parametrize(
    ("unit", "text", "expected"),
    [
        ("s", "1700000000", 1_700_000_000_000_000),
        ("s", "1700000000.123456", 1_700_000_000_123_456),
        ("ms", "1700000000123", 1_700_000_000_123_000),
        ("us", "1700000000123456", 1_700_000_000_123_456),
        ("ms", "-1", -1000),
        ("ms", "0.0005", 0),
        ("ms", "1e300", None),
        ("ms", '"2026-01-31T12:00:00Z"', None),
    ],
)
def test_numeric_timestamps(unit: str, text: str, expected: int | None) -> None:
    parser = JsonParser(pa.struct([pa.field("t", INSTANT)]), unit)
    payload = b'{"t": %s}' % text.encode()
    assert slow(parser, [payload]) == parsed(parser, [payload])
    found = parser.parse(pa.array([payload], pa.binary()))
    value = found.values.field(0).cast(pa.int64())[0].as_py() if found.reasons[0].as_py() is None else None
    assert value == expected


NESTED = pa.struct(
    [
        ("n", pa.int64()),
        ("s", pa.string()),
        ("a.b", pa.struct([("x", pa.int64())])),
        ("o", pa.struct([("x", pa.int64()), ("i", pa.struct([("x", pa.int64())]))])),
        ("l", pa.list_(pa.struct([("x", pa.int64())]))),
        ("ll", pa.list_(pa.list_(pa.struct([("x", pa.int64())])))),
        ("m", pa.map_(pa.string(), pa.struct([("x", pa.int64())]))),
        ("plain", pa.map_(pa.string(), pa.int64())),
    ]
)


@pytest.mark.parametrize("with_map", [True, False])
@pytest.mark.parametrize("payload, extra", [
    ({"n": 1, "o": {"x": 1, "i": None}, "l": [], "ll": [[]]}, {}),
    ({"o": {"x": 1, "new": {"a": [1.0, None]}}}, {"o": '{"new":{"a":[1.0,null]}}'}),
    ({"o": {"new": None, "i": {"x": 1, "y": "z"}}}, {"o": '{"new":null,"i":{"y":"z"}}'}),
    ({"o": {"X": 1}, "O": 2, "o.X": 3}, {"o": '{"X":1}', "O": "2", "o.X": "3"}),
    ({"a.b": {"y": 1}, "a": {"b": {"y": 2}}}, {"a.b": '{"y":1}', "a": '{"b":{"y":2}}'}),
    ({"l": [{"x": 1}, {"x": 2, "y": 3}, None, {"y": 4}, {}]}, {"l": '[null,{"y":3},null,{"y":4}]'}),
    ({"ll": [[], [{"x": 1}, {"y": 2}]]}, {"ll": '[null,[null,{"y":2}]]'}),
    ({"s": {"any": "thing"}}, {}),
    ({"m": {"a": {"x": 1}, "b": {"y": 2}, "c.d": {"y": 3}, "e": None}}, {"m": '{"b":{"y":2},"c.d":{"y":3}}'}),
    ({"plain": {"a": 1}, "z": 1}, {"z": "1"}),
])  # fmt: skip
def test_extra_fields_of_structs_are_kept_with_their_place(payload: Any, extra: Any, with_map: bool) -> None:
    fields = [field for field in NESTED if with_map or not pa.types.is_map(field.type)]
    if not with_map:
        extra = extra if "m" not in payload else {"m": json.dumps(payload["m"], separators=(",", ":"))}
        extra = {**extra, **({"plain": '{"a":1}'} if "plain" in payload else {})}
    parser = JsonParser(pa.struct(fields), extra=True)
    data = [json.dumps(payload).encode()] * 3
    assert parsed(parser, data) == slow(parser, data)
    for row in parser.parse(pa.array(data, pa.binary())).values.to_pylist():
        assert dict(row["_extra"]) == extra


def test_maps_arrays_of_rows_and_extra_fields() -> None:
    payloads = [b'{"n": 1, "m": {"a": 1, "b": null}}', b'{"m": {"a": 1, "a": 2}}', b'{"m": {"a": "x"}}']
    assert (
        parsed(JsonParser(MAPS), payloads)
        == slow(JsonParser(MAPS), payloads)
        == [
            (0, repr({"n": 1, "m": [("a", 1), ("b", None)]}), None),
            (1, "None", "field 'm' has a key that stands twice"),
            (2, "None", "field 'm{}' is not a number"),
        ]
    )
    number = pa.struct([pa.field("n", pa.int64())])
    rows = [b'[{"n": 1}, {"n": 2}]', b"[]", b'[{"n": 1}, {"n": "x"}]', b'{"n": 3}']
    assert parsed(JsonParser(number, explode=True), rows) == [
        (0, "{'n': 1}", None),
        (0, "{'n': 2}", None),
        (1, "None", "an array without rows"),
        (2, "None", "field 'n' is not a number"),
        (3, "{'n': 3}", None),
    ]
    more = [b'{"n": 1}', b'{"n": 2, "z": 1.50, "y": "a", "z": [1.0, {"b": "\\u00e9"}], "w": null}']
    extra = [{"n": 1, "_extra": []}, {"n": 2, "_extra": [("z", '[1.0,{"b":"é"}]'), ("y", '"a"'), ("w", "null")]}]
    for payloads in (more, more[:1], more[1:]):
        found = parsed(JsonParser(number, extra=True), payloads)
        assert [value for _, value, _ in found] == [
            repr(row) for row in extra if (row["n"] == 1 and more[0] in payloads) or (row["n"] == 2 and more[1] in payloads)
        ]


# --- JSON: fast equals one ------------------------------------------------------------------------------------------

ATOMS = [
    *"1 -1 -0 1.0 1e3 127 128 -129 9223372036854775807 9223372036854775808 1e999 1.7976931348623159e308 1e-999 3.5e38 "
    "3.4e38 16777217 NaN -Infinity Inf true false null 01 +1 .5 1. tru 'a' 1700000000000 1700000000.5 2147483648 1.25 "
    '1.255 1.250 12345.25 [] [1] [1,null] [1e39] {} [{}] "open'.split(),
    *map(
        json.dumps,
        [
            "x",
            "",
            "1",
            "1.25",
            "+1.5",
            ".5",
            "5.",
            " 1",
            "1e1",
            "0x10",
            "1_0",
            "NaN",
            "Infinity",
            "a, Inf",
            "é",
            "\0",
            "2026-01-01T00:00:00Z",
            "2026-01-01 00:00:00",
            "2026-01-01T00:00:00.123456789Z",
            "2026-01-01T00:00:00.123456",
            "2026-01-01T00:00:00+02:00",
            "2026-01-01T00:00:00-24:00",
            "2026-01-01T00:00:00+02:60",
            "2026-01-01T24:00:00",
            "2026-01-01T23:59:60Z",
            "2026-02-29",
            "2024-02-29",
            "0000-01-01",
            "0001-01-01T00:00:00+01:00",
            "9999-12-31T23:59:59.999999-01:00",
            "2026-01-01",
            "2026-1-1",
            "aGk=",
            "aGk",
            "aG=k",
        ],
    ),
    '"é"',
    '"\xff"',
    '"\\ud800"',
    '"\\udc00"',
    '"a\tb"',
    '"a\nb"',
    '["a"]',
    '[{"i":1}]',
    '[{"i":null},null]',
    '[{"i":1,"i":2}]',
    '{"a":1}',
    '{"a":null}',
    '{"a":1,"u":"v","z":[1,{"a":3}]}',
    '{"a":1,"a":2}',
    '{"a":1,"t":"2026-01-01T00:00:00Z"}',
]
USUAL = {
    "n": "1",
    "b": "2",
    "d": "1.5",
    "f": "2.5",
    "s": '"s"',
    "k": "true",
    "t": '"2026-01-01T00:00:00Z"',
    "p": '"2026-01-01 00:00:00"',
    "day": '"2026-01-01"',
    "m": "1.25",
    "x": '"aGk="',
    "o": '{"a":1}',
    "l": "[1]",
    "q": '[{"i":1}]',
    "z": "1",
    "y": '"y"',
}
WHOLE = [payload for payload, _ in JSON] + [
    b',"n": 2}',
    b'{"o": {"a": 1}',
    b'{"n": 1}\0{"n": 2}',
    b'{"n": 1}]}',
    b'{"n": 1}}',
    b'{"n": 1}}{',
    b'{"n":1}/*}*/}',
    b'{,"n":1}',
]
members = st.tuples(st.sampled_from(sorted(USUAL)), st.one_of(st.none(), st.none(), st.none(), st.sampled_from(ATOMS)))


def _object(items: list[tuple[str, str | None]], separator: str) -> bytes:
    texts = [f'"{name}":{USUAL[name] if value is None else value}' for name, value in items]
    return ("{" + separator.join(texts) + "}").encode("utf-8")


objects = st.builds(
    _object,
    st.lists(members, max_size=6, unique_by=lambda item: item[0]).map(lambda items: [("n", None), *items]),
    st.sampled_from([",", ", ", ",\n"]),
)
payload_lists = st.lists(st.one_of(objects, objects, objects, st.sampled_from(WHOLE)), min_size=1, max_size=40)
PARSERS = {
    "texts": JsonParser(RECORD),
    "ms": JsonParser(RECORD, "ms"),
    "extra": JsonParser(RECORD, extra=True),
    "explode": JsonParser(RECORD, explode=True),
    "maps": JsonParser(MAPS),
}


@settings(max_examples=60, deadline=None)
@given(payload_lists, st.sampled_from(sorted(PARSERS)), st.integers(1, 40))
def test_fast_equals_one(payloads: list[bytes], name: str, cut: int) -> None:
    parser = PARSERS[name]
    expected = slow(parser, payloads)
    assert parsed(parser, payloads) == expected
    pieces = [parsed(parser, payloads[start : start + cut]) for start in range(0, len(payloads), cut)]
    assert [row[1:] for piece in pieces for row in piece] == [row[1:] for row in expected]


@settings(max_examples=60, deadline=None)
@given(objects, st.sampled_from(["texts", "ms", "extra"]))
def test_fast_accepts_only_valid_payloads(payload: bytes, name: str) -> None:
    if is_fast(PARSERS[name], payload):
        [(_, _, reason)] = slow(PARSERS[name], [payload])
        assert reason is None


def test_ordinary_payloads_are_parsed_by_fast() -> None:
    parser = JsonParser(RECORD)
    usual = _object([(name, None) for name in USUAL], ", ")
    assert is_fast(parser, usual) and is_fast(parser, b" " + usual + b"\n") and is_fast(parser, b'{"n": 1, "s": "Info"}')
    assert is_fast(CsvParser(FLAT), b"1,2,1.5,2.5,s,true,2026-01-01T00:00:00Z,2026-01-01 00:00:00,2026-01-01,1.25,aGk=\r\n")
    assert is_fast(NumberParser(pa.float64()), b" 1.5\n") and is_fast(NumberParser(pa.decimal128(5, 2)), b"1.5")


def test_payloads_that_are_valid_only_when_joined_are_rejected() -> None:
    number = JsonParser(pa.struct([pa.field("n", pa.int64()), pa.field("o", pa.struct([pa.field("a", pa.int64())]))]))
    payloads = [b'{"n": 1}{"n": 2}', b'{"o": {"a": 1}', b',"n": 3}', b'{"n": 4}', b'{"n": 5}\0}', b'{"n": 6}']
    reasons = [reason for _, _, reason in parsed(number, payloads)]
    assert [reason is None for reason in reasons] == [False, False, False, True, False, True]
    many = [b'{"n": %d}' % n if n % 97 else payloads[n // 97 % 3] for n in range(5000)]
    assert parsed(number, many) == slow(number, many)


# --- CSV and numbers ------------------------------------------------------------------------------------------------

CELLS = pa.struct([pa.field("n", pa.int64(), False), pa.field("s", pa.string()), pa.field("d", pa.float64())])
CSV: list[tuple[bytes, object]] = [
    (b"1,a,1.5", (1, "a", 1.5)),
    (b"1,a,1.5\r\n", (1, "a", 1.5)),
    (b" 1 , a ,", (1, " a ", None)),
    (b"1,,", (1, None, None)),
    (b'1,"a,""b""",2', (1, 'a,"b"', 2.0)),
    (b'1,"a\nb",2', (1, "a\nb", 2.0)),
    (b"\xef\xbb\xbf1,\xc3\xa9,2", (1, "\u00e9", 2.0)),
    (b"+1,a,1e3", (1, "a", 1000.0)),
    (b"", "empty payload"),
    (b" \r\n", "empty payload"),
    (b"\xff", "not UTF-8"),
    (b",a,1", "field 'n' is missing"),
    (b"1.0,a,1", "field 'n' is not a whole number"),
    (b"0x1,a,1", "field 'n' is not a whole number"),
    (b"1,a,nan", "field 'd' is not a number"),
    (b"1,a,1e999", "field 'd' is not a finite number"),
    (b"1,a", "2 fields, not 3"),
    (b"1,a,1,", "4 fields, not 3"),
    (b'1,"a,1', "not CSV"),
    (b"1,a,1\n2,b,2", "more than one line"),
]


@pytest.mark.parametrize(("payload", "expected"), CSV)
def test_csv_becomes_a_row_or_a_reason(payload: bytes, expected: object) -> None:
    parser = CsvParser(CELLS)
    value = "None" if isinstance(expected, str) else repr(dict(zip("nsd", expected)))  # type: ignore[call-overload]
    for read in (slow, parsed):
        assert read(parser, [payload]) == [(0, value, expected if isinstance(expected, str) else None)]


def test_csv_of_several_lines_with_a_header_and_its_own_characters() -> None:
    cells = pa.struct([pa.field("b", pa.int64()), pa.field("a", pa.string())])
    parser = CsvParser(cells, ";", "'", ("a", "skipped", "b"), explode=True)
    payloads = [b"x;?;1\n'y;z';?;2\n", b"x;?;1\n\nx;?;q", b"x;?;3"]
    assert (
        parsed(parser, payloads)
        == slow(parser, payloads)
        == [
            (0, "{'b': 1, 'a': 'x'}", None),
            (0, "{'b': 2, 'a': 'y;z'}", None),
            (1, "None", "field 'b' is not a whole number"),
            (2, "{'b': 3, 'a': 'x'}", None),
        ]
    )


cells = st.one_of(
    st.sampled_from(["", " ", "1", "-1", "1.5", "a", '"a"', '"', "true", "TRUE", "2026-01-01", "\r", "\n", "\ufeff", "1e999", "aGk="]),
    st.text("0123456789.+-eE xnaif\t", max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(cells, max_size=4).map(lambda row: ",".join(row).encode()), min_size=1, max_size=30),
    st.booleans(),
)
def test_fast_equals_one_for_text(payloads: list[bytes], explode: bool) -> None:
    kinds = [pa.int16(), pa.string(), pa.float32(), pa.bool_(), pa.date32(), INSTANT, pa.decimal128(4, 1), pa.binary()]
    parsers: list[RowParser] = [CsvParser(CELLS, explode=explode), NumberParser(pa.float64()), NumberParser(pa.int8())]
    parsers += [CsvParser(pa.struct([pa.field("v", kind)])) for kind in kinds]
    for parser in parsers:
        assert parsed(parser, payloads) == slow(parser, payloads)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"3.5", 3.5),
        (b" -2e3\n", -2000.0),
        (b".5", 0.5),
        (b"NaN", "not a number"),
        (b"3,5", "not a number"),
        (b"1e999", "not a finite number"),
        (b"", "empty payload"),
        (b"1d", "not a number"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_number_becomes_a_row_or_a_reason(payload: bytes, expected: object) -> None:
    for kind in (pa.float64(), pa.struct([pa.field("value", pa.float64(), False)])):
        parser = NumberParser(kind)
        value = expected if kind == pa.float64() else {"value": expected}
        for read in (slow, parsed):
            assert read(parser, [payload]) == [(0, "None", expected) if isinstance(expected, str) else (0, repr(value), None)]


# --- topics ---------------------------------------------------------------------------------------------------------


def test_levels_of_a_topic() -> None:
    pattern = parse_pattern("sensors/{plant}/+/{machine}/{rest...}")
    assert pattern.filter == "sensors/+/+/+/#" and pattern.names == ("plant", "machine", "rest")
    assert pattern.split("sensors/p/x/m/a/b") == ["p", "m", "a/b"]
    assert pattern.split("sensors//x/m") == ["", "m", None]


@pytest.mark.parametrize("text", ["sensors/+", "sensors/{a}/{A}", "{rest...}/a", "a{b}", "{}", "{a b}", "a/#/{b}", "$share/{g}/t"])
def test_invalid_patterns_are_refused(text: str) -> None:
    with pytest.raises(PatternError):
        parse_pattern(text)


# --- columns of the source ------------------------------------------------------------------------------------------

VALUE = pa.struct([pa.field("n", pa.int64(), False)])


def test_the_columns_of_the_source() -> None:
    schema = pa.schema(
        [
            ("offset", pa.int64()),
            ("value", VALUE),
            ("reason", pa.string()),
            ("rejected", pa.binary()),
            ("extra", pa.map_(pa.string(), pa.string())),
            ("item", pa.int32()),
            ("plant", pa.string()),
        ]
    )
    reader = PayloadReader(schema, PayloadOptions("json", explode=True), parse_pattern("s/{plant}"))
    assert reader.message_schema.names == ["offset", "payload", "topic"]
    payloads = [b'[{"n": 1}, {"n": 2, "z": true}]', b"?", b'{"n": 3}']
    messages = pa.RecordBatch.from_arrays(
        [pa.array([7, 8, 9]), pa.array(payloads, pa.binary()), pa.array(["s/a", "s/b", "s/a"])],
        schema=reader.message_schema,
    )
    [rows] = reader.rows(messages)
    assert rows.schema == schema
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        (7, {"n": 1}, None, None, [], 0, "a"),
        (7, {"n": 2}, None, None, [("z", "true")], 1, "a"),
        (8, None, "not JSON", b"?", None, 0, "b"),
        (9, {"n": 3}, None, None, [], 0, "a"),
    ]
    assert not list(reader.rows(messages.slice(0, 0)))


@pytest.mark.parametrize("asked", [["payload"], ["levels"], []])
def test_a_payload_with_very_many_rows_does_not_fill_the_memory(asked: list[str]) -> None:
    columns = {"payload": pa.binary(), "levels": pa.list_(pa.struct([("name", pa.string())]))}
    schema = pa.schema(
        [
            *((name, columns[name]) for name in asked),
            ("value", VALUE),
            ("reason", pa.string()),
            ("rejected", pa.binary()),
            ("item", pa.int32()),
        ]
    )
    reader = PayloadReader(schema, PayloadOptions("json", explode=True), None)
    payload = b"[" + b",".join([b'{"n":1}'] * 5000) + b"]"
    levels = [{"name": "x" * 100}] * 400
    messages = pa.RecordBatch.from_arrays(
        [pa.array([payload] * 3 if name == "payload" else [levels] * 3, columns[name]) for name in (asked or ["payload"])]
        + [pa.array([payload] * 3, pa.binary())] * (asked == ["levels"]),
        schema=reader.message_schema,
    )
    rows = 0
    for batch in reader.rows(messages):
        assert batch.select(asked).nbytes < ROWS_BYTES + 1_000_000
        if not rows:
            assert batch.column("item")[:3].to_pylist() == [0, 1, 2]
        rows += len(batch)
    assert rows == 15_000


def test_payloads_are_parsed_few_at_once() -> None:
    reader = PayloadReader(pa.schema([("value", VALUE), ("reason", pa.string())]), PayloadOptions("json"), None)
    payload = b'{"n": 1, "z": "' + b"x" * (PARSED_BYTES // 2) + b'"}'
    messages = pa.RecordBatch.from_arrays([pa.array([payload, b"{}", payload, b"{}"], pa.binary())], schema=reader.message_schema)
    assert [len(batch) for batch in reader.rows(messages)] == [2, 2]


@pytest.mark.parametrize(
    ("columns", "given", "reason"),
    [
        ({"value": VALUE, "reason": pa.string()}, None, "'value' needs the option 'payloadFormat'"),
        ({"offset": pa.int64()}, "json", "needs a schema with the columns"),
        ({"value": VALUE}, "json", "must be asked for together"),
        ({"value": pa.int64(), "reason": pa.string()}, "json", "must be a struct for JSON"),
        ({"value": VALUE, "reason": pa.int64()}, "json", "'reason' is string"),
        (
            {"value": VALUE, "reason": pa.string(), "extra": pa.map_(pa.string(), pa.string())},
            "csv",
            "'extra' is for JSON only",
        ),
        ({"value": pa.struct([("v", pa.list_(pa.int64()))]), "reason": pa.string()}, "csv", "cannot be array<bigint> in CSV"),
        ({"value": pa.string(), "reason": pa.string()}, "number", "must be of a number type"),
    ],
)
def test_invalid_schemas_are_refused(columns: dict[str, Any], given: str | None, reason: str) -> None:
    with pytest.raises(PayloadSchemaError, match=reason):
        PayloadReader(pa.schema(list(columns.items())), None if given is None else PayloadOptions(given), None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"payloadFormat": "xml"}, "'xml' is none of json"),
        ({"payloadExplode": "true"}, "is for 'payloadFormat' json and csv only"),
        ({"payloadFormat": "csv", "payloadTimestamps": "ms"}, "is for 'payloadFormat' json and protobuf only"),
        ({"payloadFormat": "json", "payloadTimestamps": "h"}, "'h' is none of"),
        ({"payloadFormat": "json", "payloadExplode": "1"}, "neither"),
        ({"payloadFormat": "csv", "payloadDelimiter": "||"}, "is not one ASCII character"),
    ],
)
def test_invalid_payload_options_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(PayloadOptionError, match=reason):
        payload_options(given)
