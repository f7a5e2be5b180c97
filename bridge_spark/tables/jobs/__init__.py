"""The ingest job's streaming queries and the backfill.  These modules need PySpark."""
