"""The life of clients and sessions: CONNECT, subscriptions, takeover, expiry."""
