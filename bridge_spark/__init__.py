"""The stream log, the Spark source that reads it, and the ingest job that writes tables."""
