"""From an accepted message to its recipients: fan-out, publication, retained messages, wills."""
