"""Makes `format("mqtt.retained")` known to Spark without a register call, as `pyspark_mqtt` does for `mqtt`."""

from __future__ import annotations

from bridge_spark.state_datasource import RetainedDataSource as DefaultSource

__all__ = ["DefaultSource"]
