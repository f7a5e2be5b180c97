"""The HTTP server: streams for readers, metrics, health and the administration API."""
