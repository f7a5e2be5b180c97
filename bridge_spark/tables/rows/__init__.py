"""From messages to table rows, in Spark: parsing, event time, duplicates, dead letters, added columns."""
