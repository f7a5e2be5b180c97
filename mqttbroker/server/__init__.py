"""One broker: its core, store, streams and listeners, from start to stop."""
