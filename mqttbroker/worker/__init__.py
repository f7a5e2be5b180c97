"""The connection worker: a process that owns sockets of clients, and sends their bytes over one link to the broker."""
