"""What the Spark source `mqtt` is made of: options, offsets, plans, and readers of the log by path and by HTTP."""
