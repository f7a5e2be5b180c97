#!/bin/sh
# FlashMQ as the bench starts it: SCRIPT PORT. FLASHMQ is the binary. It has one thread, or as many as this broker has
# connection workers in scenarios about them. Windows are opened so that the load, not a default, decides.
set -eu
command -v "${FLASHMQ:-flashmq}" > /dev/null || { echo "FLASHMQ names no program" >&2; exit 3; }
directory=$(mktemp -d)
mkdir "$directory/store"
conf="$directory/flashmq.conf"
cat > "$conf" <<CONF
thread_count ${BENCH_WORKERS:-1}
storage_dir $directory/store
log_file $directory/log
log_level notice
quiet true
max_qos_msg_pending_per_client 60000
max_qos_bytes_pending_per_client 1000000000
client_initial_buffer_size 1024
CONF
if [ -n "$BENCH_PASSWORDS" ]; then
  printf 'allow_anonymous false\nmosquitto_password_file %s\nmosquitto_acl_file %s\n' "$BENCH_PASSWORDS" "$BENCH_ACL" >> "$conf"
else
  echo "allow_anonymous true" >> "$conf"
fi
{
  echo "listen {"
  case "$BENCH_TRANSPORT" in
    ws) echo "protocol websockets" ;;
    *) echo "protocol mqtt" ;;
  esac
  if [ "$BENCH_TRANSPORT" = tls ]; then printf 'fullchain %s\nprivkey %s\n' "$BENCH_CERT" "$BENCH_KEY"; fi
  printf 'port %s\ninet_protocol ip4\ninet4_bind_address 127.0.0.1\n}\n' "$1"
} >> "$conf"
exec "${FLASHMQ:-flashmq}" --config-file "$conf"
