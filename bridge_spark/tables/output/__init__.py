"""The ingest job's tables on disk, as Parquet directories or in Delta format."""
