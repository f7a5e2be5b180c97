"""The ingest job: configuration, checkpoints, queries and tables."""
