"""The build of the compiled modules; the metadata is in pyproject.toml.

mypyc compiles the modules in ``COMPILED`` as one unit. ``MQTTBROKER_COMPILE=0`` does not compile, ``=1`` always does,
and without it the build compiles if there are a C compiler and Python's headers. A failed compilation is an error, not
a plain build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

COMPILED = [
    "topic_matcher/filters.py",
    "topic_matcher/trie.py",
    "topic_matcher/topic_tree.py",
    "sessions/reason_names.py",
    "sessions/message.py",
    "sessions/rows.py",
    "sessions/write_set.py",
    "sessions/pending_changes.py",
    "sessions/producers.py",
    "sessions/readers/partition_offsets.py",
    "sessions/readers/in_flight.py",
    "sessions/readers/assignment.py",
    "sessions/journal.py",
    "sessions/readers/stored_readers.py",
    "sessions/backpressure.py",
    "sessions/context.py",
    "sessions/delivery.py",
    "sessions/message_queue.py",
    "sessions/window.py",
    "sessions/paging.py",
    "sessions/will.py",
    "sessions/room.py",
    "sessions/session.py",
    "sessions/retained.py",
    "sessions/sorted_ids.py",
    "sessions/registry.py",
    "sessions/expiry.py",
    "mqttbroker/codec/reason_codes.py",
    "mqttbroker/codec/data_types.py",
    "mqttbroker/codec/properties.py",
    "mqttbroker/codec/frames.py",
    "mqttbroker/codec/packets.py",
    "mqttbroker/core/outgoing.py",
    "mqttbroker/core/groups.py",
    "mqttbroker/core/route.py",
    "mqttbroker/core/router.py",
    "sessions/counters.py",
    "mqttbroker/core/topic_aliases.py",
    "mqttbroker/core/incomplete_packets.py",
    "mqttbroker/core/memory_stage.py",
    "mqttbroker/core/line_limit.py",
    "mqttbroker/core/denials.py",
    "mqttbroker/core/deadline.py",
    "mqttbroker/core/rates.py",
    "mqttbroker/core/outbox.py",
    "mqttbroker/core/turns.py",
    "mqttbroker/core/acknowledgements.py",
    "mqttbroker/core/connection.py",
    "mqttbroker/core/certificate_names.py",
    "mqttbroker/core/terms.py",
    "mqttbroker/core/policy.py",
    "mqttbroker/core/networks.py",
    "mqttbroker/core/own_shard.py",
    "mqttbroker/core/ban_list.py",
    "mqttbroker/core/offences.py",
    "mqttbroker/core/bans.py",
    "mqttbroker/auth/acl.py",
    "mqttbroker/auth/permissions.py",
    "mqttbroker/core/deduplication.py",
    "mqttbroker/core/fan_out.py",
    "mqttbroker/core/publisher.py",
    "mqttbroker/core/broker_messages.py",
    "mqttbroker/core/replay.py",
    "mqttbroker/core/retained_shards.py",
    "mqttbroker/core/stream_filter.py",
    "mqttbroker/core/chunk.py",
    "mqttbroker/core/chunk_reads.py",
    "mqttbroker/core/partition_reader.py",
    "mqttbroker/core/stream_rights.py",
    "mqttbroker/core/stream_consumer.py",
    "mqttbroker/core/stream_groups.py",
    "mqttbroker/core/work_queues.py",
    "mqttbroker/core/stream_subscriptions.py",
    "mqttbroker/core/subscriptions.py",
    "mqttbroker/core/users.py",
    "mqttbroker/core/pending_connect.py",
    "mqttbroker/core/wills.py",
    "mqttbroker/core/session_lifecycle.py",
    "mqttbroker/core/redirector.py",
    "mqttbroker/core/clients.py",
    "mqttbroker/core/connect_handler.py",
    "mqttbroker/core/session_rankings.py",
    "mqttbroker/core/commits.py",
    "mqttbroker/core/memory.py",
    "mqttbroker/core/broker.py",
    "mqttbroker/core/long_packet.py",
    "mqttbroker/core/publish_handler.py",
    "mqttbroker/core/core_link.py",
    "mqttbroker/core/protocol.py",
    "mqttbroker/core/packet_reader.py",
    "mqttbroker/cluster/bus.py",
    "mqttbroker/net/abuse_limits.py",
    "mqttbroker/net/listener_policy.py",
    "mqttbroker/net/open_sockets.py",
    "mqttbroker/net/left_client.py",
    "mqttbroker/net/tls_transport.py",
    "mqttbroker/net/wire.py",
    "mqttbroker/net/link_frames.py",
    "mqttbroker/net/link.py",
    "mqttbroker/net/websocket_frames.py",
    "mqttbroker/worker/clients.py",
]

ROOT = Path(__file__).resolve().parent
LIBRARY = "mqttbroker_native"
CACHE = ROOT / "build" / "native"


def can_compile() -> bool:
    """Whether a program that includes Python.h compiles here; prints the reason to stderr if not."""
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.errors import CompileError, DistutilsError
    from setuptools._distutils.sysconfig import customize_compiler

    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.c"
        probe.write_text("#include <Python.h>\n")
        compiler = new_compiler()
        customize_compiler(compiler)
        try:
            compiler.compile([str(probe)], output_dir=directory, include_dirs=[sysconfig.get_path("include")])
        except (CompileError, DistutilsError, OSError) as error:
            print(f"mqttbroker: not compiled, no usable C compiler: {error}", file=sys.stderr)
            return False
    return True


def wants_compiled() -> bool:
    choice = os.environ.get("MQTTBROKER_COMPILE", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MQTTBROKER_COMPILE must be 0 or 1, got {choice!r}")
    return bool(COMPILED) and (choice == "1" or (choice == "" and can_compile()))


def fingerprint() -> str:
    """A digest of everything that the compiled files depend on."""
    digest = hashlib.sha256()
    tools = [sys.version, sysconfig.get_platform(), importlib.metadata.version("mypy"), os.environ.get("CFLAGS", "")]
    for part in tools + [str(sysconfig.get_config_var("CC"))]:
        digest.update(part.encode() + b"\0")
    for name in ["setup.py", *COMPILED]:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:20]


class BuildCompiled(build_ext):
    """Compiles with mypyc, or copies the files of an earlier build of the same sources from build/native.

    All modules go into one C file: the C compiler then inlines across modules, which gains more than parallel
    compilation.
    """

    def run(self) -> None:
        cached = CACHE / fingerprint()
        extensions = cached / "extensions"
        if extensions.exists():
            self.extensions = [Extension(name, []) for name in extensions.read_text().split()]
            files = self.files()
        else:
            files = self.compile()
            shutil.rmtree(CACHE, ignore_errors=True)
            copy_files(files, Path(self.build_lib), cached)
            extensions.write_text("\n".join(extension.name for extension in self.extensions))
        copy_files(files, cached, Path(self.build_lib))

    def files(self) -> list[str]:
        return [self.get_ext_filename(extension.name) for extension in self.extensions]

    def compile(self) -> list[str]:
        from mypyc.build import mypycify

        self.distribution.ext_modules = mypycify(
            COMPILED,
            opt_level="3",
            debug_level="0",
            group_name=LIBRARY,
            multi_file=False,
            target_dir=str(ROOT / "build" / "mypyc"),
        )
        for extension in self.distribution.ext_modules:
            for source in map(Path, extension.sources):
                code = source.read_text(encoding="utf-8")
                source.write_text(without_trashcan(without_indentation(code)), encoding="utf-8")
            # Without it a compiler does not inline the functions of position-independent code, as they could be
            # replaced.
            extension.extra_compile_args.append("-fno-semantic-interposition")
            # GCC reads lines of the C file again for this warning, which took two fifths of its time.
            extension.extra_compile_args.append("-Wno-misleading-indentation")
        declarations = ROOT / "build" / "mypyc" / f"__native_internal_{LIBRARY}.h"
        declarations.write_text(in_one_file(declarations.read_text(encoding="utf-8")), encoding="utf-8")
        self.initialize_options()
        self.finalize_options()
        self.parallel = True  # the small file of each module beside the one with all code
        super().run()
        return self.files()


def without_indentation(code: str) -> str:
    """mypyc indents each function more than the one before, by up to 85 MB in all."""
    return re.sub(r"^[ \t]+", "", code, flags=re.MULTILINE)


def in_one_file(declarations: str) -> str:
    """mypyc's declarations, for a C compiler that sees all calls of each function.

    It then keeps no second copy of a function that it inlines everywhere. Modules are initialised once, so that code
    need not be fast.
    """
    declarations = re.sub(r"^extern (?=[^;=\[]*\bCPy(?:Def|Py)_\w+\()", "static ", declarations, flags=re.MULTILINE)
    return re.sub(r"(_____top_level__\(void\));", r"\1 __attribute__((cold, noinline));", declarations)


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
