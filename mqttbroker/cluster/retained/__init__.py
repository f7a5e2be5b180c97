"""The retained messages of all shards, as one core has them."""
