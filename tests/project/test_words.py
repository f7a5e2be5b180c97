"""Rules about the words of code and pages, beside the glossary in docs/architecture.md."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.one_build

TEXTS = ("*.md", "docs/**/*.md", "conf/**/*.toml", "Makefile", "**/*.py")
OTHERS = {".venv", "build", "dist", ".git", "node_modules"}  # folders of files that are not ours
# Begins a sentence whose subject a reader has to look for.
WITHOUT_A_NOUN = re.compile(r'(?:^|[.:] |"""|# )(?:Those|That of)\b')


def test_no_sentence_begins_without_its_noun() -> None:
    paths = {path for pattern in TEXTS for path in ROOT.glob(pattern) if OTHERS.isdisjoint(path.relative_to(ROOT).parts)}
    assert len(paths) > 500
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WITHOUT_A_NOUN.search(line) and path.name != "test_words.py"
    ]
    assert not found
