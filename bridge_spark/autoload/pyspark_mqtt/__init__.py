"""Makes `format("mqtt")` known to Spark without a register call.

The rule kept here: Spark imports every top-level module named `pyspark_*` when
a session first looks for Python data sources, so this module only names the
class and is installed at the top level, wherever its source file lies.
"""

from __future__ import annotations

from bridge_spark.datasource import MqttDataSource as DefaultSource

__all__ = ["DefaultSource"]
