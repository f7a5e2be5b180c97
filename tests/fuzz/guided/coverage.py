"""The lines and branches that inputs reach, by Python's own tracing; it needs no fuzzer.

``python -m fuzz.guided.coverage TARGET DIRECTORY...`` prints the lines of the target's modules that the files
reach. With ``--into DIRECTORY`` it copies the files that reach something new, the smallest first.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzz.guided.target import PACKAGES, Target, make

Arc = tuple[str, int, int]  # file, and two lines that run one after the other


class Tracer:
    """Records arcs in the files of the tested packages, in all threads."""

    def __init__(self) -> None:
        self.arcs: set[Arc] = set()
        self._tested: dict[str, bool] = {}

    def begin(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def end(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        tested = self._tested.get(file)
        if tested is None:
            tested = self._tested[file] = frame.f_globals.get("__name__", "").split(".")[0] in PACKAGES
        if not tested:
            return None
        before = frame.f_code.co_firstlineno

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                self.arcs.add((file, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        self.arcs.add((file, 0, before))
        return line


def executable_lines(code: CodeType) -> set[int]:
    found = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= executable_lines(constant)
    return found


def lines_reached(target: Target, arcs: set[Arc]) -> tuple[int, int]:
    """Lines inside functions of the target's modules that were reached, and all of them."""
    reached = total = 0
    for name in target.modules:
        file = str(sys.modules[name].__file__)
        code = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
        lines = set().union(*(executable_lines(each) for each in _functions(code)))
        total += len(lines)
        reached += len(lines & {line for where, _, line in arcs if where == file})
    return reached, total


def _functions(code: CodeType) -> Iterable[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from [constant] if constant.co_flags & 2 else _functions(constant)  # 2: of a function, not of a class


def measured(name: str, files: Iterable[Path], budget: int) -> tuple[list[bytes], int, int]:
    """The inputs that reach a new arc, as far as they fit into ``budget`` bytes, and `lines_reached` by all files."""
    inputs = sorted({path.read_bytes() for path in files}, key=lambda data: (len(data), data))
    tracer = Tracer()
    chosen: list[bytes] = []
    known: set[Arc] = set()
    with tempfile.TemporaryDirectory() as directory:
        tracer.begin()
        target = make(name, Path(directory))
        try:
            for data in inputs:
                tracer.arcs = set()
                target.check(data)
                if not tracer.arcs <= known:
                    known |= tracer.arcs
                    if len(data) <= budget:
                        chosen.append(data)
                        budget -= len(data)
        finally:
            tracer.end()
            target.close()
        return chosen, *lines_reached(target, known)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--budget", type=int, default=18_000, metavar="BYTES")
    options = parser.parse_args()
    files = [path for directory in options.directories if directory.is_dir() for path in directory.iterdir()]
    chosen, reached, total = measured(options.target, files, options.budget)
    if options.into is not None:
        options.into.mkdir(parents=True, exist_ok=True)
        for data in chosen:
            (options.into / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"lines={reached}/{total} inputs={len(chosen)} bytes={sum(map(len, chosen))}")


if __name__ == "__main__":
    main()
