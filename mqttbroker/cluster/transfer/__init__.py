"""Between the data directory of a single broker and the logs and topics of a cluster."""
