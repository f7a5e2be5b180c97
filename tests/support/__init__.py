"""Helpers of the tests: brokers as processes, clients, sessions of Spark, and data directories."""
