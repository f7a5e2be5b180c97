"""The broker without sockets, clocks, threads or randomness: bytes and time in, bytes and journal operations out."""
