"""Spark's tests on the built wheel, with each Python and PySpark."""
