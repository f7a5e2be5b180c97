-- Aggregates of each sensor and minute, computed from `readings` by every run.
CREATE MATERIALIZED VIEW minutes AS
SELECT sensor, window.start AS minute, count(*) AS readings, min(value) AS low, avg(value) AS mean, max(value) AS high
FROM readings
GROUP BY sensor, window(ts, '1 minute');
