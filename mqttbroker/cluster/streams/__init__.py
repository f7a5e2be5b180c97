"""The Kafka topics of streams, derived from the logs of the shards."""
