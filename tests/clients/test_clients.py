"""The runner of `make clients`: it reads results right, and fails for what is not known. It runs no suite here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients import known, report
from clients.brokers import MOSQUITTO, OURS
from clients.known import Difference
from clients.results import FAILED, PASSED, SKIPPED, Result, from_go, from_junit
from clients.suites import SUITES

pytestmark = pytest.mark.one_build

PYTEST = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" errors="1"
failures="1" skipped="1" tests="5"><testcase classname="tests.test_client" name="test_good[a]" time="0.1" />
<testcase classname="tests.test_client" name="test_bad" time="0.1"><failure message="assert 1 == 2&#10; +  where 1 = f()">
def test_bad(): ...</failure></testcase>
<testcase classname="tests.test_client" name="test_skipped" time="0"><skipped type="pytest.skip" message="no network" />
</testcase><testcase classname="tests.test_client" name="test_torn" time="0"><error message="failed on setup">x</error>
</testcase><testcase classname="tests.test_client" name="test_bad" time="0"><error message="failed on teardown" />
</testcase></testsuite></testsuites>"""

CTEST = """<?xml version="1.0" encoding="UTF-8"?><testsuite name="Linux-c++" tests="4" failures="1" disabled="0"
skipped="1"><testcase name="test1-1" classname="test1-1" time="0.8" status="run"><system-out>ok</system-out></testcase>
<testcase name="test1-2" classname="test1-2" time="120" status="fail"><failure message="Timeout"/><system-out>x
</system-out></testcase><testcase name="test1-3" classname="test1-3" time="0" status="notrun"><skipped
message="Unable to find executable"/></testcase><testcase name="test1-4" classname="test1-4" time="0"
status="notrun"></testcase></testsuite>"""

GO = [
    {"Action": "start", "Package": "mqtt"},
    {"Action": "run", "Test": "Test_Good"},
    {"Action": "run", "Test": "Test_Good/part"},
    {"Action": "fail", "Test": "Test_Good/part"},
    {"Action": "pass", "Test": "Test_Good"},
    {"Action": "run", "Test": "Test_Bad"},
    {"Action": "output", "Test": "Test_Bad", "Output": "=== RUN   Test_Bad\n"},
    {"Action": "output", "Test": "Test_Bad", "Output": "    fvt_client_test.go:42: Error on Client.Connect(): EOF\n"},
    {"Action": "fail", "Test": "Test_Bad"},
    {"Action": "run", "Test": "Test_Skipped"},
    {"Action": "skip", "Test": "Test_Skipped"},
    {"Action": "run", "Test": "Test_Hangs"},
    {"Action": "output", "Test": "Test_Hangs", "Output": "panic: test timed out after 1m0s\n"},
    {"Action": "fail", "Package": "mqtt"},
]


def test_results_of_pytest(tmp_path: Path) -> None:
    path = tmp_path / "pytest.xml"
    path.write_text(PYTEST, encoding="utf-8")
    assert from_junit(path) == [
        Result("test_good[a]", PASSED),
        Result("test_bad", FAILED, "assert 1 == 2"),
        Result("test_skipped", SKIPPED, "no network"),
        Result("test_torn", FAILED, "failed on setup"),
    ]


def test_results_of_ctest(tmp_path: Path) -> None:
    path = tmp_path / "ctest.xml"
    path.write_text(CTEST, encoding="utf-8")
    assert from_junit(path) == [
        Result("test1-1", PASSED),
        Result("test1-2", FAILED, "Timeout"),
        Result("test1-3", FAILED, "Unable to find executable"),
        Result("test1-4", FAILED, "notrun"),
    ]


def test_results_of_go() -> None:
    assert from_go(["go: a line of the tool", *map(json.dumps, GO)]) == [
        Result("Test_Good", PASSED),
        Result("Test_Bad", FAILED, "Error on Client.Connect(): EOF"),
        Result("Test_Skipped", SKIPPED),
        Result("Test_Hangs", FAILED, "did not end"),
    ]


@pytest.mark.parametrize("text", ["", "<testsuite></testsuite>", "<testsuite><testcase name='cut'>"])
def test_a_suite_without_results_did_not_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="report.xml"):
        from_junit(path)
    with pytest.raises(ValueError, match="no test"):
        from_go([text])


def test_what_is_not_known_is_a_problem() -> None:
    differences = [
        Difference("suite", ("test_old*", "test_both[1]"), "it is old", (OURS,)),
        Difference("suite", ("test_flaky",), "a race of its own", (OURS, MOSQUITTO), sometimes=True),
    ]
    results = [
        Result("test_old_1", FAILED), Result("test_old_2", PASSED), Result("test_both[1]", FAILED),
        Result("test_flaky", PASSED), Result("test_new", FAILED, "assert 0"), Result("test_good", PASSED),
        Result("test_old_3", SKIPPED)
    ]  # fmt: skip
    assert known.problems(differences, "suite", OURS, results) == [
        f"suite: test_old_2 passed against {OURS}: remove it from known.toml",
        f"suite: test_new failed against {OURS}: assert 0",
    ]
    assert len(known.problems(differences, "other", OURS, results)) == 3


def test_the_page_has_each_failure_and_its_reason() -> None:
    suite = SUITES[0]
    differences = [Difference(suite.name, ("b",), "it is | old.", (OURS,))]
    outcomes = {
        (suite.name, OURS): [Result("a", PASSED), Result("b", FAILED, "assert 0"), Result("c", SKIPPED)],
        (suite.name, MOSQUITTO): [Result("a", PASSED), Result("b", PASSED), Result("d", FAILED, "assert 1")],
    }
    lines = report.page([suite], {OURS: "1.0", MOSQUITTO: "2.0.11"}, outcomes, differences).splitlines()
    assert f"| {suite.name} | {suite.version} | 1 of 2, 1 skipped | 2 of 3 |" in lines
    assert f"| {suite.name} | b | failed | passed | it is \\| old. |" in lines
    assert f"| {suite.name} | d | – | failed | assert 1 |" in lines
    assert not any(line.startswith(f"| {suite.name} | a ") for line in lines)


def test_the_committed_differences_name_suites_and_brokers() -> None:
    for difference in known.load():
        assert difference.suite in [suite.name for suite in SUITES]
        assert difference.brokers and set(difference.brokers) <= {OURS, MOSQUITTO}
        assert difference.tests and difference.reason.endswith(".")
