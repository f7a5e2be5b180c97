"""The stream log and the PySpark source that reads it."""
