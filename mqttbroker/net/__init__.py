"""Sockets, TLS and WebSocket: how bytes reach the core and leave it."""
