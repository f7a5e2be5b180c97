"""The header that a schema registry puts before a payload: 0, and the schema's id of four bytes."""

from __future__ import annotations

from bridge_spark.source.row_parser import BadPayload

HEADER = 5
"""Bytes."""


def id_in_header(payload: bytes) -> int:
    """Raises `BadPayload` without a header."""
    if len(payload) < HEADER or payload[0]:
        raise BadPayload("no schema id" if payload else "empty payload")
    return int.from_bytes(payload[1:HEADER], "big")
