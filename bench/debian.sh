#!/bin/sh
# Names the missing Debian packages of the bench, and installs them with CI=true: a C compiler with OpenSSL, mosquitto, and for
# the group "streams", or a scenario of it that peers take part in, Redis and RabbitMQ. Their services are then not started, now
# or at boot. SCRIPT SCENARIOS.
set -eu
. "$(dirname "$0")/../tests/support/debian_packages.sh"
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
if [ "${CI:-}" != true ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "make bench: goes on without what these would add: apt-get install $packages" >&2
  exit 0
fi
install_packages "$packages" "$services"
