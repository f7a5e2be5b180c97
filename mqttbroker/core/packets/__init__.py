"""The packets that clients send, and what each of them does."""
