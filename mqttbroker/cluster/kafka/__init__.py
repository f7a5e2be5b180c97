"""Kafka as a cluster uses it: connections, and the logs as partitions of a topic."""
