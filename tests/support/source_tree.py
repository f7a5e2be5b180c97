"""The project's sources as syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

from support.paths import ROOT


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def compiled_paths() -> list[str]:
    for node in parse(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            paths: list[str] = ast.literal_eval(node.value)
            return paths
    raise AssertionError("setup.py has no COMPILED")
