"""The operator's settings as the core reads them: terms, limits and rates of the broker, its listeners and users."""
