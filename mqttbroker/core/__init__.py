"""The broker without sockets, clocks, threads or randomness: bytes and the time in, bytes and journal operations out."""
