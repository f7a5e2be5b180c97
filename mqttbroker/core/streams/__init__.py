"""Streams for MQTT clients: readers, groups, work queues."""
