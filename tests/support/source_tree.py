"""The project's sources as syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

from support.paths import ROOT


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def compiled_parts() -> dict[str, list[str]]:
    """The compiled modules of each part, as setup.py lists them."""
    for node in parse(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS":
            parts: dict[str, tuple[str, list[str]]] = ast.literal_eval(node.value)
            return {name: modules for name, (_, modules) in parts.items()}
    raise AssertionError("setup.py has no PARTS")


def compiled_paths() -> list[str]:
    return [path for modules in compiled_parts().values() for path in modules]
