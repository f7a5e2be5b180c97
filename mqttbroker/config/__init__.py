"""Configuration: every setting with its unit, default and check, and the sources that it is read from."""
