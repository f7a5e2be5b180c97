"""The examples of docs/streams.md run as printed, in order, with Mosquitto's clients, and print what the page says.

Other than printed: the ports, which Mosquitto's clients read from their configuration files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from project.test_docs_examples import BLOCK, FILE
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.tools import needs

pytestmark = [
    pytest.mark.one_build,
    needs("mosquitto-clients"),
]
PAGE = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")


def environment(broker: BrokerProcess, directory: Path) -> dict[str, str]:
    """Variables with which commands without a port reach this broker."""
    for program in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
        waits = "" if program == "mosquitto_pub" else "-W 20\n"
        (directory / program).write_text(f"-h 127.0.0.1\n-p {broker.port}\n{waits}")
    programs = directory / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("mqttbroker", "-m mqttbroker")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(directory),
        "MQTTBROKER_API_URL": broker.url,
        "MQTTBROKER_API_TOKEN": "token",
    }


def test_examples_print_what_the_page_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE)
    config = tomllib.loads("".join(code for language, code in blocks if language == "toml"))
    ran = 0
    with BrokerProcess(config={**config, "http": {"token": "token"}}) as broker:
        variables = environment(broker, tmp_path)
        for (language, code), (following, expected) in zip(blocks, [*blocks[1:], ("", "")]):
            if language == "python":
                named = FILE.match(code) or FILE.match(code.replace("# ", "# ./", 1))
                assert named is not None
                (tmp_path / named[1]).write_text(code.replace("1883", str(broker.port)))
            if language != "sh":
                continue
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", code], cwd=tmp_path, env=variables,
                                  capture_output=True, text=True, timeout=60)  # fmt: skip
            assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
            if following == "text":
                assert done.stdout == expected, f"{code}\n{done.stderr}"
                ran += 1
    assert ran >= 7
