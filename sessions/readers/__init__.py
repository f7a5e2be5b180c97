"""Readers of streams whose offsets the broker keeps: sessions, groups and queues."""
