"""The stream log: record batches, segments, partitions, retention; sealing, check, repair and backup."""
