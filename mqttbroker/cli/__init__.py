"""The `mqttbroker` command and its subcommands."""
