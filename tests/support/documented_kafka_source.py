"""The code of docs/spark.md that reads a cluster's stream by Spark's own Kafka source."""

from __future__ import annotations

import re

from support.paths import ROOT


def kafka_source_code(servers: str, topic: str) -> str:
    """The code, with these Kafka brokers and this topic. It needs the name ``spark``, and defines `messages_of`, and the
    streaming DataFrames ``records`` and ``messages``."""
    code: str
    [code] = [
        block
        for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "spark.md").read_text("utf-8"), re.M | re.S)
        if 'format("kafka")' in block
    ]
    for printed, here in {"kafka1:9092,kafka2:9092": servers, "mqtt.stream.sensors": topic}.items():
        assert printed in code
        code = code.replace(printed, here)
    return code


def kafka_source_options(code: str) -> dict[str, str]:
    """The options of the source in the code."""
    options = dict(re.findall(r'\.option\("(.*?)", "(.*?)"\)', code))
    assert options["kafka.isolation.level"] == "read_committed"
    return options
