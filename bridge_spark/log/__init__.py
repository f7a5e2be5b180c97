"""The log of a stream: segments, offsets, retention; sealing, checking and repairing them.  The broker writes it."""
