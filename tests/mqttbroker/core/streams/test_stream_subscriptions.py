"""Subscriptions to streams on a broker that has none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core import Core

from mqttbroker.config.settings import Stream


@pytest.mark.parametrize("topic_filter", ["$stream/s/", "$share/g/$stream/s/", "$replay/earliest/s/#"])
def test_a_reason_why_streams_are_unavailable_is_that_of_the_suback(tmp_path: Path, topic_filter: str) -> None:
    with Core(tmp_path, others={"streams": (Stream("s", ("s/#",)),)}) as core:
        core.broker.stream_subscriptions.unavailable = "not available in a cluster"
        suback = core.connect("client").subscribe(topic_filter)
        assert suback.reason_codes == [0x83]
        assert suback.properties.reason_string == "not available in a cluster"
