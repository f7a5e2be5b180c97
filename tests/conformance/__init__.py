"""The normative statements of the standards, and the cases that test a broker against them."""
