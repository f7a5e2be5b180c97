"""Conversion of configurations and databases of other brokers."""
