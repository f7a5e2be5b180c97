"""The documentation as a site, and the commands of its pages about moving here."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from project.test_docs_examples import BLOCK
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_session import python_path

from mqttbroker.cli.main import main
from mqttbroker.codec.packets import Puback, Publish

GROUPS = ("clients", "subscriptions", "retained", "users", "acl", "bans", "streams")

pytestmark = pytest.mark.one_build


def build_site(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--config-file", config, "--site-dir", target]
    return subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = build_site(tmp_path)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    outside = r"(?:src|href)=\"(?:https?:)?//(?!squidfunk)[^\"]*\.(?:js|css|woff2?)"
    assert not re.search(outside, (tmp_path / "index.html").read_text(encoding="utf-8")), "a page loads from another site"


def test_the_pages_are_there_as_text(tmp_path: Path) -> None:
    """Each page as Markdown, all in `llms-full.txt`, and `llms.txt` in the format of llmstxt.org, in the order of the navigation."""
    built = build_site(tmp_path)
    assert built.returncode == 0, built.stderr
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sections = [part if isinstance(part, dict) else {"Overview": [part]} for part in settings["nav"]]
    expected = [(title, page) for section in sections for title, pages in section.items() for page in pages]
    assert {page for _, page in expected} == {path.name for path in (ROOT / "docs").glob("*.md")}
    title, summary, *rest = (tmp_path / "llms.txt").read_text(encoding="utf-8").split("\n\n")
    assert (title, summary) == (f"# {settings['site_name']}", f"> {settings['site_description']}")
    assert "(llms-full.txt)" in rest[0]
    found, full = [], (tmp_path / "llms-full.txt").read_text(encoding="utf-8")
    for heading, links in zip(rest[1::2], rest[2::2], strict=True):
        for line in links.splitlines():
            link = re.fullmatch(r"- \[([^\]]+)\]\(([\w-]+\.md)\): (\S.{15,}\S)", line)
            assert link is not None and "](" not in link[3], line
            found.append((heading.removeprefix("## "), link[2]))
            text = (tmp_path / link[2]).read_text(encoding="utf-8")
            source = (ROOT / "docs" / link[2]).read_text(encoding="utf-8")
            assert text.startswith("# ") and text in full and "](../" not in text
            assert len(text.splitlines()) == len(source.splitlines()) and text.count("```") == source.count("```")
    assert found == expected


def test_the_first_sentence_of_a_page() -> None:
    first_sentence = runpy.run_path(str(ROOT / "docs" / "site_text.py"))["first_sentence"]
    table, fence = "| a | b |\n|---|---|\n| c | d |", "```sh\necho It is code. It is none\n```"
    for text, sentence in {
        "`limits` of [version\n5.0](page.md#part) **hold**. Others follow.": "`limits` of version 5.0 hold.",
        "As follows:\n\n- one": "As follows", "No full stop": "No full stop", "- a list": "",
    }.items():  # fmt: skip
        assert first_sentence(f"# Title\n\n{table}\n\n{fence}\n\n{text}\n") == sentence


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    docs = tmp_path / "docs"
    docs.mkdir()
    hook = ROOT / "docs" / "site_links.py"
    for link in ("missing.md", "../missing.toml", "index.md#missing"):
        (docs / "index.md").write_text(f"# A page\n\n[a link]({link})\n", encoding="utf-8")
        text = yaml.safe_dump({**settings, "nav": ["index.md"], "hooks": [str(hook)], "docs_dir": str(docs)})
        (tmp_path / "mkdocs.yml").write_text(text, encoding="utf-8")
        built = build_site(tmp_path / "site", tmp_path / "mkdocs.yml")
        assert built.returncode == 1 and "missing" in built.stderr, link


def test_commands_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each `mqttbroker COMMAND` in the text of these pages is one, with its options."""
    found = 0
    for page in ("troubleshooting.md", "migration-emqx.md", "install.md", "migration.md", "tutorial.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        inline = re.findall(r"`(mqttbroker [a-z][^`\n]*)`", text)
        lines = [line for kind, code in BLOCK.findall(text) if kind == "sh" for line in re.sub(r"\\\n", " ", code).splitlines()]
        for command in inline + [line[line.index("mqttbroker ") :] for line in lines if re.search(r"(^|\s)mqttbroker [a-z]", line)]:
            words = shlex.split(re.sub(r"\s[|<>].*", "", command), comments=True)[1:]
            action = words[1:2] if len(words) > 1 and words[1].isalpha() else ["list"]  # a group without an action lists
            with pytest.raises(SystemExit) as ended:
                main([words[0], *(action if words[0] in GROUPS else ()), "--help"])
            help_text = capsys.readouterr().out
            assert ended.value.code == 0, command
            for option in (word for word in words if re.match(r"--?[A-Za-z]", word)):
                assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text), f"{command}: {option}"
            found += 1
    assert found > 25


def test_retained_messages_of_another_broker_are_copied_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migration-emqx.md").read_text(encoding="utf-8")
    (script,) = [code for kind, code in BLOCK.findall(page) if kind == "sh"]
    retained = {"plant/1": b"21.5", "plant/2": bytes(range(256)), "$other/3": b"not below #"}
    with BrokerProcess() as old, BrokerProcess() as new:
        with RawClient(old.port) as client:
            client.connect("publisher")
            for topic, payload in retained.items():
                client.send(Publish(topic, payload, 1, True, False, client.next_packet_id(), None))
                client.expect(Puback)
            client.disconnect()
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "mqttbroker").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m mqttbroker "$@"\n', encoding="utf-8")
        (programs / "mqttbroker").chmod(0o755)
        script = script.replace("-h emqx", f"-h 127.0.0.1 -p {old.port}").replace("-h 127.0.0.1 -V", f"-h 127.0.0.1 -p {new.port} -V")
        script = script.replace("-W 5", "-W 3")
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": python_path()}
        subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=50)
        with RawClient(new.port) as client:
            client.connect("reader")
            client.subscribe("#")
            copied = {}
            while len(copied) < 2:
                message = client.expect(Publish)
                copied[message.topic] = (message.payload, message.retain)
    assert copied == {topic: (retained[topic], True) for topic in ("plant/1", "plant/2")}
