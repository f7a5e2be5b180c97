"""Makes `format("mqtt.sessions")` known to Spark without a register call, as `pyspark_mqtt` does for `mqtt`."""

from __future__ import annotations

from bridge_spark.state_datasource import SessionsDataSource as DefaultSource

__all__ = ["DefaultSource"]
