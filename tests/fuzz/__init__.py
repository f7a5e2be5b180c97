"""Bad input, made by the thousand: what it is, where it is sent, and what must never follow from it."""
