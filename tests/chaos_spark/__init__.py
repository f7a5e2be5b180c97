"""`make chaos-spark`: publishers, the broker and Spark's driver killed at random, and each reading counted in the table."""
