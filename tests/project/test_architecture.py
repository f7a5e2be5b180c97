"""Rules that no single file shows: import directions, the compiled set, log lines, the map in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.source_tree import compiled_paths, parse

pytestmark = pytest.mark.one_build

PACKAGES = ("topic_matcher", "sessions", "bridge_spark", "mqttbroker")
SPARK = {"pyspark", "pyarrow", "pandas", "numpy"}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Imports at module level, without those inside functions or under TYPE_CHECKING."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)):
            yield from imports_when_loaded(ast.Module(body=node.body, type_ignores=[]))


def imports_at_run_time(tree: ast.Module) -> Iterator[str]:
    """All imports but those for types only."""
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in for_types:
            yield from imports(node)


ALLOWED = {
    "topic_matcher": r"topic_matcher\b",
    "sessions": r"(topic_matcher|sessions)\b",
    "bridge_spark": r"(topic_matcher\.filters|sessions\.(message|reason_names)|bridge_spark)\b",
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


# Package: the siblings that it may import.
LAYERS = {
    "bridge_spark.log": "",
    "bridge_spark.source": "log",
    "bridge_spark.sink": "source",
    "bridge_spark.tables": "log source datasource java",
    "mqttbroker.codec": "",
    "mqttbroker.config": "",
    "mqttbroker.core": "codec",
    "mqttbroker.logs": "config",
    "mqttbroker.system": "config core",
    "mqttbroker.net": "codec config core system",
    "mqttbroker.cluster": "codec config core net system",
    "mqttbroker.worker": "codec core cluster net system logs",
    "mqttbroker.auth": "codec config core system",
    "mqttbroker.bridges": "codec config core net auth system",
    "mqttbroker.admin": "codec config core net auth bridges logs",
    "mqttbroker.server": "codec config core net auth bridges admin system logs",
    "mqttbroker.node": "config core net cluster worker auth admin server system logs",
    "mqttbroker.migration": "codec config core auth admin",
    "mqttbroker.cli": "codec config core net cluster auth admin migration server node system logs",
}


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_one_way(package: str) -> None:
    top, _, layer = package.partition(".")
    allowed = {layer, "__version__", "build_kind", *LAYERS[package].split()}
    ours = [
        (name_of(path), name) for path in modules(package.replace(".", "/")) for name in imports(parse(path)) if name.startswith(f"{top}.")
    ]
    assert ours and not [pair for pair in ours if pair[1].split(".")[1] not in allowed]


# Package: its rooms, and the rooms that each may import, for types as well. Files that are in no room stand under their own names.
ROOMS = {
    "core": {
        "terms": "",
        "access": "terms",
        "routing": "access",
        "client": "terms access",
        "delivery": "terms access routing client",
        "streams": "terms access routing client delivery",
        "sessions": "terms access routing client delivery streams",
        "broker commits memory": "terms access routing client delivery streams sessions",
        "packets": "terms access routing client delivery streams sessions broker commits memory",
    },
    "cluster": {
        "formats shards": "",
        "kafka": "",
        "log": "",
        "links": "formats",
        "retained": "shards",
        "shard": "kafka log",
        "bus": "kafka log",
        "streams": "kafka log",
        "transfer": "shards kafka log retained shard bus streams",
        "nodes": "formats kafka shard",
        "other_shards": "links retained bus",
        "shard_parts": "formats shards kafka log links retained shard bus streams nodes other_shards",
    },
    "admin": {
        "data": "",
        "control": "",
        "events": "",
        "metrics": "data control events",
        "http": "data control events metrics",
    },
}


@pytest.mark.parametrize(("package", "rooms"), [(package, rooms) for package, table in ROOMS.items() for rooms in table])
def test_rooms_import_one_way(package: str, rooms: str) -> None:
    allowed = {*rooms.split(), *ROOMS[package][rooms].split()}
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules(f"mqttbroker/{package}")
        if path.relative_to(ROOT / "mqttbroker" / package).parts[0].removesuffix(".py") in rooms.split()
        for name in imports(parse(path))
        if name.startswith(f"mqttbroker.{package}.") and name.split(".")[2] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_is_in_the_table(package: str) -> None:
    folder = ROOT / "mqttbroker" / package
    rooms = {path.relative_to(folder).parts[0].removesuffix(".py") for path in modules(f"mqttbroker/{package}")}
    assert rooms - {"__init__"} == {room for key in ROOMS[package] for room in key.split()}


def test_the_ground_floor_has_two_files() -> None:
    """The package's name and version, and `python -m mqttbroker`; all else is in a room."""
    assert {path.name for path in (ROOT / "mqttbroker").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_package_has_a_layer() -> None:
    packages = {name_of(path) for path in modules("bridge_spark", "mqttbroker") if path.name == "__init__.py"}
    assert {name for name in packages if name.count(".") == 1} == set(LAYERS)


def test_the_sqlite_store_is_imported_only_where_it_is_chosen() -> None:
    """The core knows the store by its interface; the server, backup and repair know that it is SQLite."""
    users = [
        name_of(path)
        for path in modules("sessions", "mqttbroker/core", "mqttbroker/codec", "mqttbroker/net", "mqttbroker/auth")
        if "sessions/store/" not in path.as_posix()
        for name in imports(parse(path))
        if name.startswith("sessions.store")
    ]
    assert not users


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
    """Imports inside functions count too; those for types only do not."""
    loads = {name_of(path): list(imports_at_run_time(parse(path))) for path in modules(*PACKAGES)}
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


def test_every_module_has_a_docstring() -> None:
    assert not [name_of(path) for path in modules(*PACKAGES, "tests") if ast.get_docstring(parse(path)) is None]


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {name_of(path) for path in modules(*PACKAGES) if path.name == "__init__.py" and "autoload" not in path.parts}
    assert not [name for name in packages if f"`{name}`" not in page]


def test_the_architecture_page_names_only_what_exists() -> None:
    """Each backticked dotted name of the page is a module, or a class or function of one."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    known = {name_of(path): path for path in modules(*PACKAGES)}
    missing = []
    for name in set(re.findall(r"`((?:topic_matcher|sessions|bridge_spark|mqttbroker)\.[\w.]+)`", page)):
        if name == "mqttbroker.segment":  # a key in the footer of Parquet files
            continue
        module = name
        while module not in known:
            module = module.rpartition(".")[0]
        defined = {
            node.name for node in ast.walk(parse(known[module])) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        }
        missing += [name for part in name[len(module) + 1 :].split(".") if part and part not in defined]
    assert not missing


def test_no_file_names_a_path_of_a_machine() -> None:
    pattern = re.compile("/(" + "|".join(("tmp", "work", "root", "home/[a-z]+")) + ")/")
    files = modules(*PACKAGES, "tests", "bench") + [
        path
        for kind in (
            "*.toml",
            "*.md",
            "*.py",
            "Makefile",
            "Dockerfile",
            "conf/*.*",
            "conf/*/*.*",
            "conf/helm/mqttbroker/**/*.*",
            "docs/*.md",
            ".ci/run",
            "bench/brokers/*",
        )
        for path in sorted(ROOT.glob(kind))
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert not found


def test_no_time_limit_swallows_a_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11 does, if what it waits for happens at the same time: the task would never end."""
    found = [str(path.relative_to(ROOT)) for path in modules("mqttbroker") if "asyncio.wait_for(" in path.read_text(encoding="utf-8")]
    assert not found, "use asyncio.timeout"


def test_compiled_modules_import_only_compiled_modules() -> None:
    # Calls inside the compiled unit are C calls; a call into an interpreted module goes through Python objects.
    sources = {name_of(ROOT / path): ROOT / path for path in compiled_paths()}
    packages = {name_of(path) for path in modules(*PACKAGES) if path.name != "__init__.py"}
    missing = [
        f"{module} imports {candidate}"
        for module, path in sources.items()
        for name in imports_when_loaded(parse(path))
        for candidate in (name, name.rpartition(".")[0])
        if candidate in packages and candidate not in sources
    ]
    assert not missing


def test_no_compiled_module_shadows_a_source() -> None:
    assert not [path for package in PACKAGES for path in (ROOT / package).rglob("*.so")]


def test_log_messages_are_events() -> None:
    """`log.format = "json"` makes fields of ``event=NAME key=value``; any other text would stay one field."""
    calls = re.compile(r"\blog(?:ger)?\.(?:info|warning|error|exception)\(\s*(.*)")
    packages = ("sessions", "bridge_spark/log", "mqttbroker")
    said = [text for path in modules(*packages) for text in calls.findall(path.read_text(encoding="utf-8"))]
    assert len(said) > 50
    assert [text for text in said if not re.match(r'"event=\w+( \w+=(\w+|%\w|%\.\d\w|%s\.idx))* ?"', text)] == []
