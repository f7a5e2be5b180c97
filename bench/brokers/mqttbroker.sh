#!/bin/sh
# The broker of this project, as the bench starts it: SCRIPT PORT. MQTTBROKER is the command to measure; what the
# scenario asks for stands in BENCH_... (docs/performance.md).
set -eu
directory=$(mktemp -d)
export MQTTBROKER_LISTENERS__0__TYPE="$BENCH_TRANSPORT" MQTTBROKER_DURABILITY="$BENCH_DURABILITY"
export MQTTBROKER_WORKERS="${BENCH_WORKERS:-0}"
if [ "$BENCH_TRANSPORT" = tls ]; then
  export MQTTBROKER_LISTENERS__0__CERTFILE="$BENCH_CERT" MQTTBROKER_LISTENERS__0__KEYFILE="$BENCH_KEY"
fi
if [ -n "$BENCH_PASSWORDS" ]; then
  export MQTTBROKER_ALLOW_ANONYMOUS=false MQTTBROKER_PASSWORD_FILE="$BENCH_PASSWORDS" MQTTBROKER_ACL_FILE="$BENCH_ACL"
fi
: > "$directory/broker.toml"
if [ -n "$BENCH_STREAM" ]; then
  printf '[streams.bench]\nfilters = ["%s"]\n' "$BENCH_STREAM" > "$directory/broker.toml"
fi
exec $MQTTBROKER serve --config "$directory/broker.toml" --host 127.0.0.1 --port "$1" --http-port "$BENCH_HTTP_PORT" \
  --data-dir "$directory/data" --log-level error
