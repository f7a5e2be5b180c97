"""The standard's normative statements and the scripts that hold a broker to them."""
