"""Logs: lines, levels, and where they go."""
