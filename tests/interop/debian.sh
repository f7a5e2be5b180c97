#!/bin/sh
# Installs the missing Debian packages of the tests: mosquitto's commands, the Paho C client, mosquitto itself to compare
# decisions with, and prometheus for the alerts. Their services are not started, now or at boot.
set -eu
. "$(dirname "$0")/../support/debian_packages.sh"
PATH=$PATH:/usr/local/sbin:/usr/sbin
packages="" services=""
for service in mosquitto prometheus; do
  command -v "$service" >/dev/null || services="$services $service"
done
packages="$services"
command -v mosquitto_rr >/dev/null || packages="$packages mosquitto-clients"
echo '#include <MQTTClient.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || packages="$packages gcc libc6-dev libpaho-mqtt-dev"
test -n "$packages" || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "the tests need: apt-get install$packages" >&2
  exit 1
fi
install_packages "$packages" "$services"
