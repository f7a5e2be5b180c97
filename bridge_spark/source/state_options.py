"""The options of the data sources `mqtt.retained` and `mqtt.sessions`, checked at load time like those of `mqtt`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from bridge_spark.source import option_values as values
from bridge_spark.source.http_client import PATIENT_RETRIES, RETRIES, HttpClient
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.options import SPARK_INTERNAL, ca_file_of, token_of, topic_filter_of

RETAINED_SELECTION = ("filter",)
SESSIONS_SELECTION = ("prefix", "contains", "username", "connected", "listener", "address")
"""Options that select rows: the parameters of the HTTP API."""

_COMMON = ("url", "schema", "token", "tokenFile", "caFile", "fetch.numRetries", "fetch.retryIntervalMs", "fetch.timeoutMs")
_KAFKA_NAMES = {"kafka.bootstrap.servers": "url", "kafka.ssl.truststore.location": "caFile"}


@dataclass(frozen=True)
class StateOptions:
    """Checked options; ``selection`` has the parameters of the HTTP API that select rows."""

    url: str
    selection: dict[str, str]
    schema: str | None
    include_user_properties: bool
    token: str | None
    ca_file: str | None
    fetch_retries: int | None
    fetch_retry_interval_ms: int
    request_timeout_ms: int

    def client(self, patient: bool) -> HttpClient:
        """A client that waits for a broker that restarts, or, unless ``patient``, reports a wrong address within
        seconds."""
        retries = self.fetch_retries
        if retries is None:
            retries = PATIENT_RETRIES if patient else RETRIES
        return HttpClient(self.url, self.token, self.ca_file, retries, self.fetch_retry_interval_ms / 1000, self.request_timeout_ms / 1000)


def parse_state_options(options: Mapping[str, str], source: str, more: tuple[str, ...]) -> StateOptions:
    """Check Spark's option map for a source with ``more`` options than the common ones; raises `OptionError`."""
    names = values.OptionNames(
        (*_COMMON, *more), SPARK_INTERNAL, _KAFKA_NAMES, "the closest to this option of the Kafka source", f"the options of {source}"
    )
    given = names.given(options)
    url = values.url(given, "url")
    if url is None:
        raise OptionError("url", "missing: give the broker's HTTP address")
    values.boolean(given, "connected", False)
    _check_network(given, "address")
    topic_filter_of(given)
    retries = values.count(given, "fetch.numRetries", 0) if "fetch.numRetries" in given else None
    return StateOptions(
        url=url,
        selection={
            name: given[name].strip().lower() if name == "connected" else given[name]
            for name in (*RETAINED_SELECTION, *SESSIONS_SELECTION)
            if name in given
        },
        schema=given.get("schema"),
        include_user_properties=values.boolean(given, "includeUserProperties", False),
        token=token_of(given),
        ca_file=ca_file_of(given, url),
        fetch_retries=retries,
        fetch_retry_interval_ms=values.count(given, "fetch.retryIntervalMs", 100),
        request_timeout_ms=values.positive(given, "fetch.timeoutMs") or 30_000,
    )


def _check_network(given: Mapping[str, str], name: str) -> None:
    try:
        ipaddress.ip_network(given.get(name, "::"))
    except ValueError as error:
        raise OptionError(name, f"is not an address or network: {error}") from None
