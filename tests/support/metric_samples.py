"""Parse the text of `/metrics`."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(text: bytes) -> dict[str, float]:
    """Sample values by name; label values are appended as ``/value``."""
    found = {}
    for family in text_string_to_metric_families(text.decode("utf-8")):
        assert family.documentation
        for sample in family.samples:
            found[sample.name + "".join(f"/{value}" for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def drops(found: dict[str, float], cause: str = "") -> float:
    """The dropped messages of all listeners in `samples`; of all causes if ``cause`` is ""."""
    prefix = f"mqttbroker_messages_dropped_total/{cause + '/' if cause else ''}"
    counts = [value for name, value in found.items() if name.startswith(prefix)]
    assert counts
    return sum(counts)
