"""A cluster: sessions in shards, each with a log in Kafka and one owner at a time."""
