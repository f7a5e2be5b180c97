"""sessions.store.interface: the broker's side of the store knows no database."""

from __future__ import annotations

import ast

import pytest
from support.paths import ROOT


@pytest.mark.parametrize("name", ["sessions/rows.py", "sessions/write_set.py", "sessions/journal.py", "sessions/store/interface.py"])
def test_the_interface_of_the_store_imports_no_database(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [module for module in imported if module == "sqlite3" or module.startswith("sessions.store")]
