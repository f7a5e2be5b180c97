"""Each row is in the stream once after kills of driver and broker."""

from __future__ import annotations

from collections import Counter

import pytest
from chaos_spark.sink import BATCH, chaos

pytestmark = pytest.mark.one_build


@pytest.mark.slow(reason="two and thirteen starts of Spark; test_sink_spark.py repeats a micro-batch")
@pytest.mark.parametrize(("driver_kills", "broker_kills"), [(1, 1), (12, 20)])
@pytest.mark.timeout(1800)
def test_each_row_is_in_the_stream_once_after_kills(driver_kills: int, broker_kills: int) -> None:
    result = chaos(driver_kills, broker_kills, seed=driver_kills)
    rows = BATCH * (driver_kills + broker_kills + 2)
    assert result.found == Counter(range(rows))
    assert result.inside >= driver_kills // 2
