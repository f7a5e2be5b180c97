#!/bin/sh
# Mosquitto as the bench starts it: SCRIPT PORT. Queues and windows are opened so that the load, not a default, decides.
# MOSQUITTO is the binary, MOSQUITTO_PERSISTENCE a persistence plugin of Mosquitto 2.1 to use in place of its file.
set -eu
directory=$(mktemp -d)
conf="$directory/mosquitto.conf"
cat > "$conf" <<CONF
per_listener_settings false
max_inflight_messages 0
max_queued_messages 0
user $(id -un)
log_type error
CONF
if [ -n "${MOSQUITTO_PERSISTENCE:-}" ]; then
  printf 'plugin %s\nplugin_opt_db_file %s\n' "$MOSQUITTO_PERSISTENCE" "$directory/mosquitto.sqlite3" >> "$conf"
else
  printf 'persistence true\npersistence_location %s/\n' "$directory" >> "$conf"
fi
if [ -n "$BENCH_PASSWORDS" ]; then
  printf 'allow_anonymous false\npassword_file %s\nacl_file %s\n' "$BENCH_PASSWORDS" "$BENCH_ACL" >> "$conf"
else
  echo "allow_anonymous true" >> "$conf"
fi
# Version 2.0 does not start with WebSocket listeners alone, hence the socket.
if [ "$BENCH_TRANSPORT" = ws ]; then echo "listener 0 $directory/socket" >> "$conf"; fi
echo "listener $1 127.0.0.1" >> "$conf"
case "$BENCH_TRANSPORT" in
  tls) printf 'certfile %s\nkeyfile %s\n' "$BENCH_CERT" "$BENCH_KEY" >> "$conf" ;;
  ws) echo "protocol websockets" >> "$conf" ;;
esac
PATH=$PATH:/usr/sbin:/usr/local/sbin
exec "${MOSQUITTO:-mosquitto}" -c "$conf"
