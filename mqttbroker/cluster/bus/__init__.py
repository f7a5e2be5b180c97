"""The bus: messages in the logs of other shards, to the sessions of this one."""
