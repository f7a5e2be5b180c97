"""The rules of the house that a reader cannot see in one file: imports, sizes, no trace of one machine."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGES = ("topic_matcher", "sessions", "bridge_spark", "mqttbroker")
SPARK = {"pyspark", "pyarrow", "pandas", "numpy"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """The imports that happen as soon as the module is imported, not those inside functions or for types only."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)):
            yield from imports_when_loaded(ast.Module(body=node.body, type_ignores=[]))


ALLOWED = {
    "topic_matcher": r"topic_matcher\b",
    "sessions": r"(topic_matcher|sessions)\b",
    "bridge_spark": r"(topic_matcher\.filters|sessions\.message|bridge_spark)\b",
    "mqttbroker": r"(topic_matcher|sessions|bridge_spark|mqttbroker)\b",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules(package)
        for name in imports(parse(path))
        if name.partition(".")[0] in PACKAGES and not re.match(ALLOWED[package], name)
    ]
    assert not wrong


@pytest.mark.parametrize("part, known", [("log", "log"), ("source", "log|source"), ("tables", r"log|source|tables|datasource|java")])
def test_parts_of_the_bridge_import_one_way(part: str, known: str) -> None:
    ours = [(name_of(path), name) for path in modules(f"bridge_spark/{part}")
            for name in imports(parse(path)) if name.startswith("bridge_spark.")]
    assert ours and not [pair for pair in ours if not re.match(rf"bridge_spark\.({known})\b", pair[1])]


def test_topic_matcher_needs_only_the_standard_library() -> None:
    used = {name.partition(".")[0] for path in modules("topic_matcher") for name in imports(parse(path))}
    assert used <= set(sys.stdlib_module_names) | {"topic_matcher", "mypy_extensions"}


def test_the_broker_loads_neither_spark_nor_arrow() -> None:
    loads = {name_of(path): list(imports_when_loaded(parse(path))) for path in modules(*PACKAGES)}
    waiting = [name for name in loads if name.startswith("mqttbroker")]
    reached = set(waiting)
    while waiting:
        module = waiting.pop()
        for name in loads[module]:
            assert name.partition(".")[0] not in SPARK, f"{module} loads {name}"
            for candidate in (name, name.rpartition(".")[0]):
                if candidate in loads and candidate not in reached:
                    reached.add(candidate)
                    waiting.append(candidate)


def test_no_module_imports_itself_in_a_circle() -> None:
    loads = {name_of(path): list(imports_when_loaded(parse(path))) for path in modules(*PACKAGES)}
    graph = {
        module: {c for name in names for c in (name, name.rpartition(".")[0]) if c in loads and c != module}
        for module, names in loads.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_files_and_functions_are_short() -> None:
    long = []
    for path in modules(*PACKAGES, "tests", "bench") + [ROOT / "setup.py"]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {size} lines")
    assert not long


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(path) for path in modules(*PACKAGES, "tests") if ast.get_docstring(parse(path)) is None]
    assert not silent


def test_no_path_of_one_machine() -> None:
    pattern = re.compile("/(" + "|".join(("tmp", "work", "root", "home/[a-z]+")) + ")/")
    files = modules(*PACKAGES, "tests", "bench") + [
        path
        for kind in ("*.toml", "*.md", "*.py", "Makefile", "Dockerfile", "conf/*", "docs/*.md", ".ci/run", "bench/brokers/*")
        for path in sorted(ROOT.glob(kind))
    ]
    found = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in files
             for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]
    assert not found


def test_what_is_compiled_imports_only_what_is_compiled() -> None:
    # An interpreted module in between would be called through Python objects, where calls inside the unit are C calls.
    sources = {name_of(ROOT / path): ROOT / path for path in compiled_paths()}
    houses = {name_of(path) for path in modules(*PACKAGES) if path.name != "__init__.py"}
    missing = [
        f"{module} imports {candidate}"
        for module, path in sources.items()
        for name in imports_when_loaded(parse(path))
        for candidate in (name, name.rpartition(".")[0])
        if candidate in houses and candidate not in sources
    ]
    assert not missing


def compiled_paths() -> list[str]:
    for node in parse(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            paths: list[str] = ast.literal_eval(node.value)
            return paths
    raise AssertionError("setup.py has no COMPILED")


def test_no_compiled_file_hides_a_source() -> None:
    assert not [path for package in PACKAGES for path in (ROOT / package).rglob("*.so")]


def test_logs_are_events() -> None:
    """`log.format = "json"` makes fields of ``event=NAME key=value``, and of anything else one text."""
    calls = re.compile(r'\blog(?:ger)?\.(?:info|warning|error|exception)\(\s*(.*)')
    houses = ("sessions", "bridge_spark/log", "mqttbroker")
    said = [text for path in modules(*houses) for text in calls.findall(path.read_text(encoding="utf-8"))]
    assert len(said) > 50
    assert [text for text in said if not re.match(r'"event=\w+( \w+=(\w+|%\w|%\.\d\w|%s\.idx))* ?"', text)] == []
