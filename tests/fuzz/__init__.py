"""Fuzzing: generators of invalid input, the targets it is sent to, and the checks of their behaviour."""
