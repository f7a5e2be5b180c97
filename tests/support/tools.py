"""Programs that tests need and no package of Python brings.

As a script, before the tests: names what is missing, with the command that installs it, and installs nothing. The tests that
need it are skipped (`needs`, `lacking`). In continuous integration (CI=true) the script installs it from Debian, and a tool
that is missing then is a failure. With names of tools as arguments, only these, and a missing one is a failure anywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    import pytest

INSTALL = Path(__file__).with_name("debian_packages.sh")


class Tool(NamedTuple):
    """Programs of which one or all must be there, or a header of C; Debian's packages; what its tests try."""

    programs: tuple[str, ...]
    packages: str
    tests: str
    any_of_them: bool = False
    header: str = ""
    services: str = ""  # of the packages, started by Debian's installation

    def found(self) -> bool:
        there = any if self.any_of_them else all
        return there(program(name) is not None for name in self.programs) and (not self.header or has_header(self.header))


TOOLS = {
    "cc": Tool(("cc", "gcc"), "gcc libc6-dev", "compiled builds, the load of the bench, power loss", any_of_them=True),
    "paho-c": Tool((), "gcc libc6-dev libpaho-mqtt-dev", "the Paho C client", header="MQTTClient.h"),
    "mosquitto": Tool(("mosquitto", "mosquitto_passwd"), "mosquitto", "bridges to Mosquitto, and the same decisions as Mosquitto's",
                      services="mosquitto"),
    "mosquitto-clients": Tool(("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"), "mosquitto-clients",
                              "Mosquitto's commands, and those that the documentation shows"),
    "prometheus": Tool(("prometheus", "promtool"), "prometheus", "alerts", services="prometheus"),
    "chromium": Tool(("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"), "chromium-headless-shell", "the dashboard",
                     any_of_them=True),
    "maven": Tool(("mvn", "java"), "maven", "clusters, with Kafka, which Maven downloads, and Spark's Kafka source"),
    "tshark": Tool(("tshark",), "tshark", "traces of packets"),
    "fail2ban": Tool(("fail2ban-regex",), "fail2ban", "the filter for fail2ban", services="fail2ban"),
    "systemd": Tool(("systemd-analyze",), "systemd", "the systemd units"),
    "curl": Tool(("curl",), "curl", "the requests that the documentation shows"),
    "ip": Tool(("ip",), "iproute2", "links of a cluster that are cut"),
    "util-linux": Tool(("unshare", "setpriv"), "util-linux", "the image, and users without rights"),
}  # fmt: skip


def program(name: str) -> str | None:
    """The path of a program, also of those that Debian has on root's path only."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin")


def any_program(tool: str) -> str | None:
    return next(filter(None, map(program, TOOLS[tool].programs)), None)


def has_header(name: str) -> bool:
    compiler = os.environ.get("CC") or program("cc") or program("gcc")
    if compiler is None:
        return False
    command = [*compiler.split(), "-E", "-"]
    return subprocess.run(command, input=f"#include <{name}>\n", capture_output=True, text=True, check=False).returncode == 0


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not TOOLS[name].found()]


def packages_of(names: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(" ".join(TOOLS[name].packages for name in names).split()))


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that need these tools. In CI it skips nothing, so that a missing tool fails the tests."""
    import pytest

    absent = missing(names)
    return pytest.mark.skipif(bool(absent) and not in_ci(), reason=f"needs: apt-get install {packages_of(absent)}")


def lacking(reason: str) -> NoReturn:
    """Skip the running test, or fail it in CI."""
    import pytest

    if in_ci():
        pytest.fail(reason)
    pytest.skip(reason)


def install(names: Sequence[str]) -> None:
    """Install the packages from Debian, without starting their services, now or at boot."""
    services = " ".join(TOOLS[name].services for name in names).split()
    script = f'. "{INSTALL}"; install_packages "{packages_of(names)}" "{" ".join(services)}"'
    subprocess.run(["sh", "-eu", "-c", script], check=False, stdin=subprocess.DEVNULL)


def main(names: list[str]) -> int:
    absent = missing(names or list(TOOLS))
    if absent and in_ci() and os.geteuid() == 0 and shutil.which("apt-get"):
        install(absent)
        absent = missing(absent)
    if not absent:
        return 0
    fails = in_ci() or bool(names)
    print("make: missing tools" + ("" if fails else ", without which these tests are skipped:"), file=sys.stderr)
    for name in absent:
        print(f"  {name:18} {TOOLS[name].tests}", file=sys.stderr)
    print(f"make: on Debian, as root: apt-get install --no-install-recommends {packages_of(absent)}", file=sys.stderr)
    if services := [service for name in absent for service in TOOLS[name].services.split()]:
        print(f"make: which starts services that no test needs: systemctl disable --now {' '.join(services)}", file=sys.stderr)
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
