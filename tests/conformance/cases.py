"""All cases, and the brokers they run against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance import cases_connect, cases_delivery, cases_publish, cases_subscribe, cases_websocket, cases_wire
from conformance.script import Case

# Broker settings by the name that a case gives; "default" are the broker's defaults.
BROKERS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {
        "response_information": "replies/%c",
        "limits": {
            "retain_available": False,
            "max_packet_size": "1KiB",
            "topic_alias_maximum": 0,
            "receive_maximum": 5,
            "max_keep_alive": "2s",
        },
    },
    "websocket": {"listeners": [{"host": "127.0.0.1", "port": 0, "type": "tcp"}, {"host": "127.0.0.1", "port": 0, "type": "ws"}]},
    "moved": {"redirect": {"server_reference": "other.example:1883", "permanent": True}},
    "guarded": {"allow_anonymous": False, "password_file": str(Path(__file__).parent / "users")},
}

CASES: list[Case] = [
    case for part in (cases_wire, cases_connect, cases_publish, cases_subscribe, cases_delivery, cases_websocket) for case in part.CASES
]
