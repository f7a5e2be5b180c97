"""Makes `format("mqtt")` known to Spark without a register call.

Spark imports every top-level module named `pyspark_*` when a session first looks up a Python data source.
"""

from __future__ import annotations

from bridge_spark.datasource import MqttDataSource as DefaultSource

__all__ = ["DefaultSource"]
