"""Which sessions a topic reaches: routes, the router with its cache, shared subscriptions."""
