"""Bridges: connections of this broker to others, as a client of theirs."""
