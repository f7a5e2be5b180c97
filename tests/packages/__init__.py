"""`make dist`: the packages of the broker, built and tried."""
