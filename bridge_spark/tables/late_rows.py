"""Which messages the state of a query left out because they came too late.

The rule kept here: Spark drops them without a trace but a count, so they are
found again by what decided it, the watermark in the checkpoint, and the count
must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


def dropped(query: StreamingQuery) -> int:
    """How many rows the batch that is being written has lost to the watermark."""
    execution = query._jsq.streamingQuery().lastExecution()
    return _dropped_below(execution.executedPlan())


def _dropped_below(plan: Any) -> int:
    metric = plan.metrics().get("numRowsDroppedByWatermark")
    own = int(metric.get().value()) if metric.isDefined() else 0
    children = plan.children()
    return own + sum(_dropped_below(children.apply(number)) for number in range(children.size()))
