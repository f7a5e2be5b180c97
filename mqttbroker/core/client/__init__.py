"""One client's connection: its state, its outbox and its acknowledgements."""
