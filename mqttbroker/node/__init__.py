"""A node of a cluster: its process, the processes of its shards, and its HTTP server."""
