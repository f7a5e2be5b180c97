#!/bin/sh
# Mosquitto as the bench starts it: SCRIPT PORT. Queues and windows are opened so that the load, not a default, decides.
set -eu
directory=$(mktemp -d)
cat > "$directory/mosquitto.conf" <<CONF
listener $1 127.0.0.1
allow_anonymous true
persistence true
persistence_location $directory/
max_inflight_messages 0
max_queued_messages 0
user $(id -un)
log_type error
CONF
PATH=$PATH:/usr/sbin:/usr/local/sbin
exec mosquitto -c "$directory/mosquitto.conf"
