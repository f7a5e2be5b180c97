"""Queries and commands on a running broker."""
