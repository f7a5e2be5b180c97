# Sourced by scripts for sh: `install_packages PACKAGES SERVICES` installs Debian packages, as root. SERVICES are those among
# PACKAGES that would start a service, which is neither started now nor at boot.
install_packages() {
  policy=/usr/sbin/policy-rc.d # Debian runs it before it starts a service
  if [ -n "$2" ] && [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get update -q
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $1
  if [ -n "$2" ] && command -v systemctl >/dev/null; then
    # shellcheck disable=SC2086
    systemctl disable --quiet $2 || true
  fi
}
