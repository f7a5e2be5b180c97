"""Coverage-guided fuzzing: a target turns any bytes into input of one parser and checks the results."""
