"""The data directory: backup, repair, permissions and versions."""
