#!/bin/sh
# Installs a headless Chromium from Debian unless there is one. Without it the tests of the dashboard are skipped.
set -eu
for program in chromium-headless-shell chromium chromium-browser google-chrome; do
  if command -v "$program" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "the tests of the dashboard are skipped without: apt-get install chromium" >&2
  exit 0
fi
apt-get update -q
for package in chromium-headless-shell chromium; do
  if DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$package"; then exit 0; fi
done
echo "no Chromium can be installed: the tests of the dashboard are skipped" >&2
