"""The build of the compiled modules; the metadata is in pyproject.toml.

mypyc compiles the modules in ``PARTS`` into one library. ``MQTTBROKER_COMPILE=0`` does not compile, ``=1`` always does,
and without it the build compiles if there are a C compiler and Python's headers. A failed compilation is an error, not
a plain build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# Each part is one C file with an optimisation level of its own, and parts are compiled at the same time. "hot" are the
# modules between the reading of a packet and the writing of the packets that it causes: calls inside a part are inlined.
# "rest" takes at most 1 % of the CPU time of any scenario of `make bench`, with connections that come and go.
PARTS = {
    "hot": (
        "-O3",
        [
            "topic_matcher/filters.py",
            "topic_matcher/trie.py",
            "sessions/reason_names.py",
            "sessions/message.py",
            "sessions/rows.py",
            "sessions/row_kinds.py",
            "sessions/write_set.py",
            "sessions/pending_changes.py",
            "sessions/journal.py",
            "sessions/backpressure.py",
            "sessions/context.py",
            "sessions/delivery.py",
            "sessions/message_queue.py",
            "sessions/window.py",
            "sessions/paging.py",
            "sessions/room.py",
            "sessions/deliveries.py",
            "sessions/session.py",
            "sessions/sorted_ids.py",
            "mqttbroker/codec/data_types.py",
            "mqttbroker/codec/properties.py",
            "mqttbroker/codec/frames.py",
            "mqttbroker/core/client/outgoing.py",
            "mqttbroker/core/routing/groups.py",
            "mqttbroker/core/routing/route.py",
            "mqttbroker/core/routing/router.py",
            "sessions/counters.py",
            "mqttbroker/core/client/topic_aliases.py",
            "mqttbroker/core/client/incomplete_packets.py",
            "mqttbroker/core/terms/memory_stage.py",
            "mqttbroker/core/terms/rates.py",
            "mqttbroker/core/client/outbox.py",
            "mqttbroker/core/delivery/turns.py",
            "mqttbroker/core/client/acknowledgements.py",
            "mqttbroker/core/client/client_wire.py",
            "mqttbroker/core/client/connection.py",
            "mqttbroker/core/delivery/fan_out.py",
            "mqttbroker/core/delivery/publisher.py",
            "mqttbroker/core/commits.py",
            "mqttbroker/core/packets/long_packet.py",
            "mqttbroker/core/packets/publish_handler.py",
            "mqttbroker/core/packets/core_link.py",
            "mqttbroker/core/packets/protocol.py",
            "mqttbroker/core/packets/packet_reader.py",
            "mqttbroker/net/tls_transport.py",
            "mqttbroker/net/stream_turns.py",
            "mqttbroker/net/link_flush.py",
            "mqttbroker/net/flush.py",
            "mqttbroker/net/wire.py",
            "mqttbroker/net/link_frames.py",
            "mqttbroker/net/link.py",
            "mqttbroker/net/websocket_frames.py",
        ],
    ),
    "streams": (
        "-O3",
        [
            "topic_matcher/topic_tree.py",
            "sessions/producers.py",
            "sessions/readers/partition_offsets.py",
            "sessions/readers/in_flight.py",
            "sessions/readers/assignment.py",
            "sessions/readers/stored_readers.py",
            "sessions/retained.py",
            "sessions/expiry.py",
            "mqttbroker/core/delivery/deduplication.py",
            "mqttbroker/core/delivery/broker_messages.py",
            "mqttbroker/core/delivery/replay.py",
            "mqttbroker/core/delivery/cluster_port.py",
            "mqttbroker/core/streams/filter.py",
            "mqttbroker/core/streams/chunk.py",
            "mqttbroker/core/streams/chunk_reads.py",
            "mqttbroker/core/streams/partition_reader.py",
            "mqttbroker/core/streams/rights.py",
            "mqttbroker/core/streams/row_packets.py",
            "mqttbroker/core/streams/consumer.py",
            "mqttbroker/core/streams/groups.py",
            "mqttbroker/core/streams/work_queues.py",
            "mqttbroker/core/streams/subscriptions.py",
            "mqttbroker/core/memory.py",
            "mqttbroker/cluster/bus/bus.py",
            "mqttbroker/net/abuse_limits.py",
        ],
    ),
    "rest": (
        "-O1",
        [
            "mqttbroker/codec/packets.py",
            "mqttbroker/codec/reason_codes.py",
            "sessions/will.py",
            "sessions/registry.py",
            "mqttbroker/core/terms/line_limit.py",
            "mqttbroker/core/terms/deadline.py",
            "mqttbroker/core/access/denials.py",
            "mqttbroker/core/terms/certificate_names.py",
            "mqttbroker/core/terms/terms.py",
            "mqttbroker/core/access/policy.py",
            "mqttbroker/core/terms/networks.py",
            "mqttbroker/core/sessions/own_shard.py",
            "mqttbroker/core/access/ban_list.py",
            "mqttbroker/core/access/offences.py",
            "mqttbroker/core/access/bans.py",
            "mqttbroker/auth/acl.py",
            "mqttbroker/auth/permissions.py",
            "mqttbroker/core/sessions/subscriptions.py",
            "mqttbroker/core/terms/users.py",
            "mqttbroker/core/sessions/pending_connect.py",
            "mqttbroker/core/sessions/connack.py",
            "mqttbroker/core/sessions/authentications.py",
            "mqttbroker/core/delivery/wills.py",
            "mqttbroker/core/sessions/lifecycle.py",
            "mqttbroker/core/client/redirector.py",
            "mqttbroker/core/sessions/clients.py",
            "mqttbroker/core/sessions/connect_handler.py",
            "mqttbroker/core/sessions/rankings.py",
            "mqttbroker/core/broker.py",
            "mqttbroker/net/listener_policy.py",
            "mqttbroker/net/open_sockets.py",
            "mqttbroker/net/left_client.py",
            "mqttbroker/worker/clients.py",
        ],
    ),
}
COMPILED = [module for _, modules in PARTS.values() for module in modules]

ROOT = Path(__file__).resolve().parent
LIBRARY = "mqttbroker_native"
CACHE = ROOT / "build" / "native"
OBJECTS = CACHE / "objects"
MORE_FLAGS = [
    # GCC looks up each line of the C file again for this warning, which takes longer than all optimisation of it.
    "-Wno-misleading-indentation",
    # Without these a compiler does not inline the functions of position-independent code, as they could be replaced.
    "-fno-semantic-interposition",
    "-fvisibility=hidden",
]


def no_compiler() -> str:
    """Why a program that includes Python.h does not compile here, in one line; empty if it does."""
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.c"
        probe.write_text("#include <Python.h>\n")
        compiler = new_compiler()
        customize_compiler(compiler)
        include = f"-I{sysconfig.get_path('include')}"
        try:
            run_compiler("trying the C compiler", [*compiler.compiler_so, include, "-c", str(probe), "-o", f"{directory}/probe.o"])
        except SystemExit as error:
            return str(error)
    return ""


def wants_compiled() -> bool:
    choice = os.environ.get("MQTTBROKER_COMPILE", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MQTTBROKER_COMPILE must be 0 or 1, got {choice!r}")
    if choice == "0":
        return False
    problem = no_compiler()
    if problem and choice == "1":
        raise SystemExit(problem)
    if problem:
        print(f"{problem}; the build is not compiled", file=sys.stderr)
    return not problem


def toolchain() -> str:
    """What C code and its compilation depend on besides the sources."""
    tools = [sys.version, sysconfig.get_platform(), importlib.metadata.version("mypy"), sysconfig.get_config_var("CC")]
    return "\0".join(map(str, [*tools, *(os.environ.get(name, "") for name in ("CC", "CFLAGS", "LDFLAGS"))]))


def fingerprint() -> str:
    """A digest of everything that the compiled files depend on."""
    digest = hashlib.sha256(toolchain().encode())
    for name in ["setup.py", *COMPILED]:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:20]


class BuildCompiled(build_ext):
    """Compiles with mypyc, or copies the files of an earlier build of the same sources from build/native.

    Each part is one C file, so that the C compiler inlines across the modules of a part, and parts are compiled at the
    same time. The objects are in build/native/objects by a digest of what they were made from: a change compiles the
    parts whose C code it changes, and a build that was interrupted goes on where it was.
    """

    def build_extensions(self) -> None:
        cached = CACHE / fingerprint()
        names = cached / "extensions"
        try:
            if not names.exists():
                OBJECTS.mkdir(parents=True, exist_ok=True)
                modules = self.compile(cached)
                for old in CACHE.iterdir():
                    if old not in (cached, OBJECTS):
                        shutil.rmtree(old)
                names.write_text("\n".join(modules))
            self.extensions = [Extension(name, []) for name in names.read_text().split()]
            copy_files([self.get_ext_filename(extension.name) for extension in self.extensions], cached, Path(self.build_lib))
        except OSError as error:
            raise SystemExit(failed("writing compiled modules", f"{error.filename or CACHE}: {error.strerror}")) from None

    def compile(self, target: Path) -> list[str]:
        """Make all shared libraries in ``target``; returns the names of their modules."""
        from mypyc.build import mypycify

        directory = ROOT / "build" / "mypyc"
        progress = Progress("translating Python to C")
        library, *shims = mypycify(
            COMPILED,
            opt_level="3",
            debug_level="0",
            group_name=LIBRARY,
            multi_file=True,
            target_dir=str(directory),
        )
        common = [*library.extra_compile_args, *MORE_FLAGS, *(f"-I{path}" for path in library.include_dirs)]
        jobs = {}  # name: C code, flags; those first that take longest
        for name, text in sorted(c_files(directory, library.sources).items(), key=lambda item: -len(item[1])):
            jobs[name] = text, [*common, PARTS[name][0] if name in PARTS else "-O1"]
        parts = list(jobs)
        for shim in shims:
            jobs[shim.name] = Path(shim.sources[0]).read_text(encoding="utf-8"), [*common, "-O1"]
        objects: dict[str, Path] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads that wait for a compiler each
            waiting = {pool.submit(self.object_of, name, *job): name for name, job in jobs.items()}
            try:
                while waiting:
                    left = [name for name in waiting.values() if name in parts]
                    progress.show(f"compiling, {len(objects)} of {len(jobs)} files ({', '.join(left) or 'modules'})")
                    for future in wait(waiting, timeout=1, return_when=FIRST_COMPLETED).done:
                        objects[waiting.pop(future)] = future.result()
                progress.show("linking")
                linked = {library.name: [objects.pop(name) for name in parts], **{name: [made] for name, made in objects.items()}}
                list(pool.map(lambda item: self.link(target, *item), linked.items()))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        used = {made for objects_of in linked.values() for made in objects_of}
        for old in set(OBJECTS.iterdir()) - used:
            old.unlink()
        return list(linked)

    def object_of(self, name: str, text: str, flags: list[str]) -> Path:
        """The object file of this C code, from the cache or compiled now."""
        digest = hashlib.sha256("\0".join([toolchain(), *flags, text]).encode()).hexdigest()[:20]
        made = OBJECTS / f"{name}-{digest}.o"
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                source, unfinished = Path(scratch) / "code.c", Path(scratch) / "code.o"
                source.write_text(text, encoding="utf-8")
                includes = [f"-I{path}" for path in self.compiler.include_dirs]
                command = [*self.compiler.compiler_so, *includes, *flags, "-c", str(source), "-o", str(unfinished)]
                run_compiler(f"compiling {name}", command)
                os.replace(unfinished, made)  # an interrupted compilation leaves no object
        return made

    def link(self, target: Path, name: str, objects: list[Path]) -> None:
        path = target / self.get_ext_filename(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_compiler(f"linking {name}", [*self.compiler.linker_so, *map(str, objects), "-o", str(path)])


def run_compiler(step: str, command: list[str]) -> None:
    """Raises SystemExit with one line if the command fails; what it printed is then in build/compiler.log."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise SystemExit(failed(step, f"{command[0]}: {error.strerror}")) from None
    if done.returncode:
        log = ROOT / "build" / "compiler.log"
        with suppress(OSError):
            log.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}", encoding="utf-8")
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        reason = next((line for line in said if re.search(r"error|No space|Killed|killed", line)), said[-1])
        raise SystemExit(failed(step, reason))


def failed(step: str, reason: str) -> str:
    """One line: the step, the reason and what to do."""
    advice = {
        "Python.h": "install Python's headers (Debian: python3-dev, Fedora: python3-devel)",
        "No space left": f"free space in {ROOT} and in the directory of temporary files",
        "illed": "gcc needs 1 GB of memory for each of the parts",
        "No such file": "install a C compiler (Debian: gcc, Fedora: gcc), or set CC",
    }
    todo = next((what for sign, what in advice.items() if sign in reason), "build/compiler.log has all that the compiler said")
    return f"mqttbroker: {step} failed: {reason.strip()}: {todo}; then repeat it, which takes up what is compiled (MQTTBROKER_COMPILE=0 does not compile)"


class Progress:
    """What the build does, on standard error: one line that changes on a terminal, else a line for each step."""

    def __init__(self, step: str) -> None:
        self.began = time.monotonic()
        self.shown = ""
        self.show(step)

    def show(self, step: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[Kmqttbroker: {step}, {time.monotonic() - self.began:.0f} s", end="", file=sys.stderr, flush=True)
            if step == "linking":
                print(file=sys.stderr)
        elif re.sub(r"\d+ of ", "", step) != self.shown:
            self.shown = re.sub(r"\d+ of ", "", step)
            print(f"mqttbroker: {step}", file=sys.stderr, flush=True)


def c_files(directory: Path, sources: list[str]) -> dict[str, str]:
    """The C code of each part, and of "tables", which holds what all parts share; from the files that mypyc wrote."""
    runtime = [Path(source).name for source in sources if not Path(source).name.startswith("__native")]
    code = {"tables": (directory / f"__native_{LIBRARY}.c").read_text(encoding="utf-8")}
    for part, (_, modules) in PARTS.items():
        files = (f"__native_{module.removesuffix('.py').replace('/', '___')}.c" for module in modules)
        code[part] = "".join((directory / file).read_text(encoding="utf-8") for file in files)
    literals = []
    for part in PARTS:
        code[part], numbers = with_own_literals(part, without_trashcan(code[part]))
        literals.append((part, numbers))
    code["tables"] = with_literals_of_parts(code["tables"], literals)

    headers = "".join((directory / f"{name}_{LIBRARY}.h").read_text(encoding="utf-8") for name in ("__native", "__native_internal"))
    blocks = declarations(headers)
    includes = re.findall(r'^#include (?!"__native).*', headers, flags=re.MULTILINE)
    prototype = r"^[^\n=]*\bCPy(?:Def|Py)_\w+\([^\n]*\);$"
    code["tables"] = re.sub(prototype, "", code["tables"], flags=re.MULTILINE)
    words = {part: set(re.findall(r"\w+", text)) for part, text in code.items()}
    users = Counter(word for used in words.values() for word in used)
    files = {}
    for part, text in code.items():
        needed = needed_blocks(blocks, words[part])
        said = "\n".join(in_one_file(block) if users[name] == 1 else block for name, block in needed)
        # Symbols of CPython and of the C library are declared before the pragma.
        files[part] = "\n".join(
            [
                *dict.fromkeys(includes),
                "#pragma GCC visibility push(hidden)",
                *(f'#include "{name}"' for name in runtime if part == next(iter(PARTS))),
                said,
                re.sub(r'^#include "__native.*\n', "", text, flags=re.MULTILINE),
            ]
        )
    return files


def with_own_literals(part: str, code: str) -> tuple[str, list[int]]:
    """The C code with a table of literals of its own, and the numbers of these literals in mypyc's one table.

    The numbers in one table would change in all parts with each literal of a module.
    """
    numbers: dict[str, int] = {}
    code = re.sub(r"\bCPyStatics\[(\d+)\]", lambda found: f"{part}_literals[{numbers.setdefault(found[1], len(numbers))}]", code)
    return f"PyObject *{part}_literals[{len(numbers) + 1}];\n{code}", [int(number) for number in numbers]


def with_literals_of_parts(tables: str, literals: list[tuple[str, list[int]]]) -> str:
    """Fill each part's table after mypyc's."""
    declared, filled = [], []
    for part, numbers in literals:
        declared.append(f"extern PyObject *{part}_literals[];\n")
        filled += [f"{part}_literals[{own}] = CPyStatics[{number}];\n" for own, number in enumerate(numbers)]
    end = tables.index("is_initialized = 1;")
    return "".join(declared) + tables[:end] + "".join(filled) + tables[end:]


def declarations(headers: str) -> list[tuple[str, str]]:
    """(name, text) of each declaration in mypyc's headers, in order."""
    found, block, depth = [], [], 0
    for line in headers.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        block.append(line.strip())
        depth += line.count("{") - line.count("}")
        if depth == 0 and line.endswith(";"):
            name = re.search(r"(\w+)(?:\[\d*\])?(?:\([^()]*\))?;$", block[-1])
            assert name is not None, block
            text = "\n".join(block)
            if name[1].startswith("tuple_"):  # the runtime declares some, too
                text = f"#ifndef MYPYC_DECLARED_{name[1]}\n#define MYPYC_DECLARED_{name[1]}\n{text}\n#endif"
            found.append((name[1], text))
            block = []
    return found


def needed_blocks(blocks: list[tuple[str, str]], words: set[str]) -> list[tuple[str, str]]:
    """The declarations of these words, and of what these name."""
    known = set(words)
    needed = []
    for name, block in reversed(blocks):  # a declaration stands behind what it names
        if name in known:
            known.update(re.findall(r"\w+", block))
            needed.append((name, block))
    return needed[::-1]


def in_one_file(declaration: str) -> str:
    """A declaration for a C compiler that sees all calls of the function.

    It then keeps no second copy of a function that it inlines everywhere. Modules are initialised once, so that code
    need not be fast.
    """
    declaration = re.sub(r"^extern (?=[^;=\[]*\bCPy(?:Def|Py)_\w+\()", "static ", declaration)
    return re.sub(r"(_____top_level__\(void\));", r"\1 __attribute__((cold, noinline));", declaration)


def without_trashcan(code: str) -> str:
    """mypyc's C code without CPython's trashcan in deallocators of objects that have no garbage collector header.

    The trashcan keeps deallocations from nesting too deep: it links objects through that header and continues later.
    mypyc uses it for classes with ``acyclic=True``, too, where it overwrites the eight bytes in front of the object.
    """
    lines = []
    tracked = False
    for line in code.splitlines(keepends=True):
        statement = line.strip()
        if statement == "static void":
            tracked = False
        elif statement == "PyObject_GC_UnTrack(self);":
            tracked = True
        if tracked or not statement.startswith(("CPy_TRASHCAN_BEGIN(self, ", "CPy_TRASHCAN_END(self)")):
            lines.append(line)
    return "".join(lines)


def copy_files(names: list[str], source: Path, target: Path) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)


packages = find_packages(include=["topic_matcher*", "sessions*", "bridge_spark*", "mqttbroker*"])
packages.append("mqttbroker.admin.dashboard")  # files of a web page, without modules
package_dir = {}
# Spark registers the data source of each importable module named pyspark_*, so these are top-level packages.
for directory in sorted((ROOT / "bridge_spark" / "autoload").glob("pyspark_*")):
    packages.append(directory.name)
    package_dir[directory.name] = f"bridge_spark/autoload/{directory.name}"

options: dict[str, Any] = {}
if wants_compiled():
    # A placeholder that makes the wheel specific to the platform; BuildCompiled replaces it by the real list.
    options = {"ext_modules": [Extension(f"{LIBRARY}__mypyc", [])], "cmdclass": {"build_ext": BuildCompiled}}

setup(packages=packages, package_dir=package_dir, **options)
