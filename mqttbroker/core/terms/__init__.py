"""What the operator set: terms, limits and rates of the broker, its listeners and users."""
