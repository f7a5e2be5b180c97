"""``make clients``: fetches the suites, runs each against each broker, and writes docs/clients.md.

Exit status 1 if a suite does not run, if a test fails for a reason that is not known, or if one passes that is known
to fail.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.interpreters import ROOT, Failed

from clients import known, namespace, report, sources
from clients.brokers import OURS, versions
from clients.results import Result
from clients.suites import SUITES, Suite


def fetch(suite: Suite, directory: Path) -> str | None:
    """Fetch a suite unless it is there; returns why it cannot run, if so."""
    missing = sources.executables("unshare", *suite.programs)
    if missing:
        return f"{suite.name}: this machine has no {', '.join(missing)}"
    if (directory / "fetched").exists():
        return None
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        suite.fetch(directory)
    except (Failed, OSError) as error:
        return f"{suite.name}: not fetched: {error}"
    (directory / "fetched").touch()
    return None


def run_one(suite: Suite, broker: str, fetched: Path, scratch: Path) -> list[Result] | None:
    """The results of a suite against a broker; None if it did not run, which was said on stderr."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    hosts = scratch / "hosts"
    command = [sys.executable, "-P", "-m", "clients.one", suite.name, broker, str(fetched), str(scratch), str(hosts)]
    if namespace.run(command, hosts):
        return None
    results = [Result(**one) for one in json.loads((scratch / "results.json").read_text(encoding="utf-8"))]
    print(f"{suite.name} {suite.version} against {broker}: {report.totals(results)}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="for the suites, and for logs")
    parser.add_argument("--document", type=Path, help="the page to write, if all suites run")
    parser.add_argument("--jobs", type=int, default=4, help="suites that run at a time")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(suite.name for suite in SUITES))
    options = parser.parse_args()
    chosen = [suite for suite in SUITES if not options.suites or suite.name in options.suites]
    if len(chosen) < len(set(options.suites)):
        parser.error(f"the suites are {', '.join(suite.name for suite in SUITES)}")
    return check(chosen, options.directory.resolve(), None if options.suites else options.document, options.jobs)


def check(suites: Sequence[Suite], directory: Path, document: Path | None, jobs: int) -> int:
    """Run suites, print what is wrong, and write the page; returns the exit status."""
    found = [fetch(suite, directory / suite.name) for suite in suites]
    wrong = [problem for problem in found if problem is not None]
    ready = [suite for suite, problem in zip(suites, found) if problem is None]
    brokers = versions()
    pairs = [(suite, broker) for suite in ready for broker in brokers]
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(run_one, suite, broker, directory / suite.name, directory / "runs" / suite.name / broker) for suite, broker in pairs
        ]
    differences = known.load()
    outcomes = {}
    for (suite, broker), future in zip(pairs, running):
        results = future.result()
        if results is None:
            wrong.append(f"{suite.name}: did not run against {broker}")
            continue
        outcomes[suite.name, broker] = results
        if broker == OURS:
            wrong += known.problems(differences, suite.name, broker, results)
    text = report.page(suites, brokers, outcomes, differences)
    print("\n" + text.split("\n\n", 2)[2])
    print("\n".join(wrong), file=sys.stderr)
    if document is not None and len(outcomes) == len(SUITES) * len(brokers):
        (ROOT / document).write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
