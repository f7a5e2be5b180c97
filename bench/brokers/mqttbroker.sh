#!/bin/sh
# The broker of this project, as the bench starts it: SCRIPT PORT. MQTTBROKER names the command to measure.
set -eu
exec "${MQTTBROKER:-$(dirname "$0")/../../.venv/bin/mqttbroker}" serve --host 127.0.0.1 --port "$1" --http-port off \
  --data-dir "$(mktemp -d)/data" --log-level error
