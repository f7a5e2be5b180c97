"""Runs one suite against one broker, in the namespace that `clients.namespace` made; writes the results as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from support.interpreters import Failed

from clients import namespace
from clients.brokers import Setup, running
from clients.suites import SUITES


def main() -> int:
    suite_name, broker, fetched, scratch, hosts = sys.argv[1:]
    namespace.prepare(Path(hosts))
    suite = next(one for one in SUITES if one.name == suite_name)

    def start(setup: Setup) -> AbstractContextManager[None]:
        return running(broker, setup, Path(scratch) / "broker")

    try:
        results = suite.run(Path(fetched), start, Path(scratch))
    except (Failed, ValueError, OSError, AssertionError) as error:  # the last from `BrokerProcess`
        print(f"{suite_name} against {broker}: {error}", file=sys.stderr)
        return 1
    (Path(scratch) / "results.json").write_text(json.dumps([asdict(one) for one in results]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
