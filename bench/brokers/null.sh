#!/bin/sh
# Not a broker: null_broker.c relays QoS 0 between pairs, unread. Shows the most that mqtt_load can ask of anything.
set -eu
directory=$(mktemp -d)
"${CC:-cc}" -O2 -o "$directory/null_broker" "$(dirname "$0")/../null_broker.c"
exec "$directory/null_broker" "$1"
