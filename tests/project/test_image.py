"""The Dockerfile: hadolint's rules, and its steps run in a copy of this machine's file system.

No Docker is needed: an overlay file system in a mount namespace takes what the steps write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.utils import canonicalize_name
from support.interpreters import copy_tracked_files, interpreter
from support.paths import ROOT

DOCKERFILE = ROOT / "Dockerfile"
NAMESPACE = ["unshare", "--mount", "--propagation", "private"]

pytestmark = pytest.mark.one_build


# In the image: the bytes of each package of Python, with the files that Python compiles for it.
SIZES = """
import importlib.metadata, json
files = {found.metadata["Name"]: [each.locate() for each in found.files or ()] for found in importlib.metadata.distributions()}
print("SIZES", json.dumps({name: sum(path.stat().st_size for path in paths if path.exists()) for name, paths in files.items()}))
"""


class Step(NamedTuple):
    """An instruction of the Dockerfile and its text, continued lines joined."""

    instruction: str
    text: str


def steps() -> list[Step]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            instruction, _, rest = line.partition(" ")
            found.append(Step(instruction, rest.strip()))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, DOCKERFILE, ROOT / "conf" / "compose" / "notebook.Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_both_stages_have_the_same_pinned_python() -> None:
    versions = [step.text.partition("=")[2] for step in steps() if step.instruction == "ARG"]
    assert len(versions) == 2
    assert all(re.fullmatch(r"3\.\d+\.\d+-(?:slim-)?bookworm@sha256:[0-9a-f]{64}", version) for version in versions)
    assert len({version.partition("-")[0] for version in versions}) == 1


def test_every_user_id_may_write_the_data() -> None:
    """A platform may run the image with a user id of its own in the group 0."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert "install -d -m 0770 -o 1883 -g 0 /data" in text and "\nUSER 1883:1883\n" in text


def shell_script(python: str, context: Path) -> str:
    """The steps as a shell script for the root of the copy; stages share it, so copies between stages are there already."""
    lines = ["set -eux", f"export PATH={Path(python).resolve().parent}:$PATH PIP_ROOT_USER_ACTION=ignore", "umask 022"]
    for step in steps():
        if step.instruction == "RUN":
            lines.append(re.sub(r"--mount=\S+\s+", "", step.text))
        elif step.instruction == "WORKDIR":
            lines.append(f"mkdir -p {step.text} && cd {step.text}")
        elif step.instruction == "COPY":
            *sources, target = step.text.split()
            lines += [f"cp -r {context}/{source} {target}" for source in sources]
    return "\n".join(lines) + "\n"


def started(python: str) -> str:
    """A script that runs the image's command as another user on a read-only file system, and its health check."""
    found = {step.instruction: step.text for step in steps()}
    command = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    variables = " ".join(re.findall(r"[A-Z0-9_]+=\S+", found["ENV"]))
    health = json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])  # its last word is the process of the container
    programs = Path(python).resolve().parent
    as_user = "setpriv --reuid 12345 --regid 0 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    return textwrap.dedent(f"""
        set -eu
        export PATH={programs}:$PATH
        cd /tmp
        env {variables} {as_user} {" ".join(command)} >log 2>&1 &
        broker=$!
        trap 'kill -9 $broker 2>/dev/null || true; cat log' EXIT
        ! {as_user} touch /written /etc/written 2>/dev/null
        healthy=no
        for _ in $(seq 100); do
            if env {variables} {as_user} {programs}/{" ".join(health[:-1])} $broker 2>/dev/null; then healthy=yes; break; fi
            sleep 0.2
        done
        test "$healthy" = yes
        {as_user} {programs}/mqttbroker pub -V 5 -q 1 -r -t plant/1 -m 21.5
        kill -TERM $broker
        wait $broker
        test "$(stat -c %u:%a /data/mqttbroker.db)" = 12345:600
        echo the image works
    """)


def printed_sizes() -> dict[str, int]:
    """The table of docs/install.md: MB of each package, of "other packages" and of "all"."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|`]+|`[\w-]+`[^|]*) \| (\d+) \|$", page.partition("\n## Container\n")[2].partition("\n## ")[0], re.MULTILINE)
    return {name.split("`")[1] if "`" in name else name.partition(",")[0]: int(size) for name, size in rows}


def measured_sizes(output: str) -> dict[str, float]:
    """MB of each package that the image gets, by the line that SIZES printed; the stages share their packages here."""
    (told,) = re.findall(r"^SIZES (.*)$", output, re.MULTILINE)
    names = re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "requirements" / "image.txt").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = {canonicalize_name(name) for name in (*names, "mqttbroker")}
    return {name: size / 1e6 for given, size in json.loads(told).items() if (name := canonicalize_name(given)) in wanted}


@pytest.mark.slow("builds the wheels of the image, which takes two minutes")
@pytest.mark.timeout(900)
def test_the_steps_build_an_image_that_runs(tmp_path: Path) -> None:
    version = re.search(r"^ARG PYTHON=(3\.\d+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    python = interpreter(version[1])
    if python is None or os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(f"needs root, unshare and Python {version[1]}")
    context, over = tmp_path / "context", tmp_path / "over"
    copy_tracked_files(context)
    over.mkdir()
    (context / "sizes.py").write_text(SIZES, encoding="utf-8")
    (context / "build.sh").write_text(shell_script(python, context), encoding="utf-8")
    (context / "start.sh").write_text(started(python), encoding="utf-8")
    (context / "all.sh").write_text(
        textwrap.dedent(f"""
            set -eu
            mount -t tmpfs tmpfs {over}
            mkdir {over}/upper {over}/work {over}/merged
            mount -t overlay overlay -o lowerdir=/,upperdir={over}/upper,workdir={over}/work {over}/merged
            mount --rbind /proc {over}/merged/proc
            mount --rbind /dev {over}/merged/dev
            chroot {over}/merged bash {context}/build.sh
            chroot {over}/merged {python} -P {context}/sizes.py
            cp {context}/start.sh {over}/merged/start.sh
            chmod a+x {" ".join(f"{over}/merged{parent}" for parent in Path(python).resolve().parents)}
            mkdir {over}/data && cp -a {over}/merged/data/. {over}/data && chown 1883:0 {over}/data && chmod 0770 {over}/data
            mount --bind {over}/data {over}/merged/data
            mount -t tmpfs tmpfs {over}/merged/tmp
            mount -o remount,ro,bind {over}/merged
            chroot {over}/merged bash /start.sh
        """),
        encoding="utf-8",
    )
    done = subprocess.run([*NAMESPACE, "bash", context / "all.sh"], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0 and "the image works" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    sizes, printed = measured_sizes(done.stdout), printed_sizes()
    sizes["all"] = sum(sizes.values())
    sizes["other packages"] = sizes["all"] - sum(sizes[name] for name in printed if name not in ("other packages", "all"))
    assert {name: size for name, size in printed.items() if abs(sizes[name] - size) > 1 + size / 20} == {}, sizes
