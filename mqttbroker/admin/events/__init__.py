"""Alarms and client events."""
