"""Clients of a cluster whose nodes and Kafka brokers are killed and stopped: ``python -m chaos_cluster.run``."""
