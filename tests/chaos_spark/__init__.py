"""`make chaos-spark`: kills publishers, the broker and Spark's driver at random and counts each reading in the
table."""
