#!/bin/sh
# Installs the missing Debian packages of the bench: a C compiler with OpenSSL, mosquitto, and for the group "streams", or a
# scenario of it that peers take part in, Redis and RabbitMQ. Their services are not started, now or at boot. SCRIPT SCENARIOS.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin
packages="" services=""
echo '#include <openssl/ssl.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || packages="gcc libc6-dev libssl-dev"
command -v mosquitto >/dev/null || services="mosquitto"
case "${1:-}" in
  *stream*)
    command -v redis-server >/dev/null || services="$services redis-server"
    test -x /usr/lib/rabbitmq/bin/rabbitmq-server || services="$services rabbitmq-server"
    ;;
esac
packages="$packages $services"
test "$packages" != " " || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "make bench: goes on without what these would add: apt-get install $packages" >&2
  exit 0
fi
policy=/usr/sbin/policy-rc.d # Debian runs it before it starts a service
if [ -n "$services" ] && [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
apt-get update -q
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $packages
if [ -n "$services" ] && command -v systemctl >/dev/null; then
  # shellcheck disable=SC2086
  systemctl disable --quiet $services || true
fi
