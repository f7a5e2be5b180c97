"""``make bench``: every scenario runs, figures are right, and failed runs give none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos.log_reader import LogReader
from support.paths import ROOT
from support.tools import lacking

BENCH = ROOT / "bench"
sys.path.append(str(BENCH))

import report  # noqa: E402
import run  # noqa: E402
import runner  # noqa: E402
import scenarios  # noqa: E402
import spark  # noqa: E402
import stream_peers  # noqa: E402

pytestmark = pytest.mark.one_build

OURS = {"MQTTBROKER": f"{sys.executable} -P -m mqttbroker"}
TINY = "features-q1 retained100k v5-alias-q0 ws-q0 tls-q0 storm5000 one-by-one-streamed-q1"


@pytest.fixture(scope="module")
def generator() -> runner.Generator:
    return runner.build_generator()


def test_small_loads_give_every_figure(tmp_path: Path, generator: runner.Generator) -> None:
    if not generator.in_c:
        lacking("needs a C compiler")
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "--rounds", "1", "--duration", "0.05", "--scale", "0.002", "--rest", "0",
         "--no-mosquitto", "--scenarios", TINY, "--results", str(tmp_path / "results")],
        env={**os.environ, **OURS, "PEERS": ""}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "results").glob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert set(found["medians"]) == set(TINY.split())
    # The CPU time of a few connections may be less than a clock tick, and a file system in memory writes no bytes.
    missing = [(scenario, title) for scenario, figures in found["medians"].items() for title, figure in figures.items()
               if not (figure["mqttbroker"] or title.startswith(("CPU", "bytes")) and figure["mqttbroker"] == 0)]  # fmt: skip
    assert not missing
    syncs = found["medians"]["one-by-one-streamed-q1"]["syncs/message"]
    assert syncs["mqttbroker"] >= 1 and syncs["durability off"] == 0
    assert "| features-q1" in done.stdout


def test_the_core_is_measured_behind_links_and_beside_real_workers(tmp_path: Path, generator: runner.Generator) -> None:
    if not generator.in_c:
        lacking("needs a C compiler")
    links = "direct-q0 link-q0-4 link-q1-16 capacity-2 link-idle"
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "--rounds", "1", "--duration", "1", "--scale", "0.02", "--no-mosquitto",
         "--scenarios", f"workers-pairs1000-q1 {links}", "--results", str(tmp_path / "results")],
        env={**os.environ, **OURS, "PEERS": ""}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "results").glob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    by_process = found["medians"]["workers-pairs1000-q1"]
    assert all(by_process[title][runner.OURS_WORKERS] for title in ("CPU µs/message of the core", "of the workers"))
    assert by_process["of the workers"][runner.OURS] is None
    runs = {one["scenario_name"]: one for one in found["runs"]}
    assert all(runs[name]["delivered"] == runs[name].get("published", runs[name]["delivered"]) > 0 for name in links.split())
    assert runs["link-q0-4"]["messages_per_write"] == 4 and runs["link-q1-16"]["messages_per_write"] == 16
    assert runs["link-q1-16"]["of_alone"] > 0 and runs["capacity-2"]["links"] == 2 and runs["capacity-2"]["workers_fed"] > 0


def test_streams_are_measured_without_redis_and_rabbitmq(tmp_path: Path, generator: runner.Generator) -> None:
    if not generator.in_c:
        lacking("needs a C compiler")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("taskset", "cc", "gcc", "as", "ld"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    wanted = ["bystanders-of-readers", "stream-append", "stream-group"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "streams.py"), "--records", "2000", "--seconds", "0.3", "--readers", "10", *wanted],
        env={**os.environ, **OURS, "PATH": str(tools)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "redis-server" in line]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [found["scenario_name"] for found in runs] == wanted and all(found["ok"] for found in runs)
    figures = {scenario.name: scenario.figures for scenario in scenarios.stream_scenarios()}
    missing = [(found["scenario_name"], figure.key) for found in runs for figure in figures[found["scenario_name"]]
               if found.get(figure.key) is None]  # fmt: skip
    assert not missing


class Answers:
    """A socket that gives out what it was made with, and keeps what it is sent."""

    def __init__(self, *received: bytes) -> None:
        self.received = list(received)
        self.sent = b""

    def recv(self, size: int) -> bytes:
        return self.received.pop(0)

    def sendall(self, data: bytes) -> None:
        self.sent += data


def test_a_redis_reply_in_pieces_is_taken_once() -> None:
    entry = b"*2\r\n$3\r\n1-%d\r\n*4\r\n$5\r\ntopic\r\n$1\r\na\r\n$7\r\npayload\r\n$6\r\n11-1\r\n\r\n"
    reply = b":2\r\n*1\r\n*2\r\n$1\r\ns\r\n*2\r\n" + entry % 1 + entry % 2
    peer = stream_peers.Redis.__new__(stream_peers.Redis)
    for cut in range(1, len(reply)):
        sock = Answers(reply[:cut], reply[cut:])
        line = stream_peers.Line(sock)  # type: ignore[arg-type]
        assert (peer.take(line), sock.sent) == (0, b"")
        assert peer.take(line) == 2 and sock.sent.startswith(stream_peers.command(b"XACK", b"s", b"g", b"1-1", b"1-2"))


def test_confirms_of_rabbitmq_are_counted_in_any_order() -> None:
    peer = stream_peers.RabbitMQ.__new__(stream_peers.RabbitMQ)

    def ack(tag: int, multiple: int) -> bytes:
        return stream_peers.method(1, 60, 80, tag.to_bytes(8, "big") + bytes([multiple]))

    data = ack(7, 0) + ack(5, 1) + ack(100, 1) + ack(102, 0)
    line = stream_peers.Line(Answers(data[:30], data[30:]))  # type: ignore[arg-type]
    assert peer.answers(line) + peer.answers(line) == stream_peers.BATCH + 1 and len(line.tags) == stream_peers.BATCH - 1


def test_the_generator_without_a_compiler(tmp_path: Path) -> None:
    slow = runner.Generator([sys.executable, str(BENCH / "py_load.py")], False)
    peer = runner.Peer(runner.OURS, BENCH / "brokers" / "mqttbroker.sh", OURS)
    bench = runner.Bench([peer], slow, tmp_path, 0.05, 0)
    bench.round(scenarios.chosen("p2p-q1-64 p2p-q2-64"), 0, lambda _: None)
    (result,) = bench.runs
    assert result["ok"] and result["delivered"] == result["published"] > 0 and result["cpu_us_per_delivered"] > 0


def test_each_sync_of_a_process_is_counted(tmp_path: Path, generator: runner.Generator) -> None:
    if generator.sync_count is None:
        lacking("needs a C compiler, Linux and glibc")
    syncing = (
        "import mmap, os; file = os.open('file', os.O_RDWR | os.O_CREAT); os.write(file, bytes(4096));"
        "os.fsync(file); os.fdatasync(file); os.pwritev(file, [b'x'], 0, os.RWF_DSYNC); os.pwritev(file, [b'x'], 0);"
        "mmap.mmap(file, 4096).flush(); os.sync()"
    )
    count = tmp_path / "count"
    environment = {**os.environ, "LD_PRELOAD": str(generator.sync_count), "SYNC_COUNT": str(count)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", syncing], env=environment, cwd=tmp_path, check=True)
    assert int.from_bytes(count.read_bytes(), sys.byteorder) == 2 * 5


@pytest.mark.parametrize("scenario", scenarios.all_scenarios(0.001).values(), ids=lambda scenario: scenario.name)
def test_the_generator_accepts_every_scenario(scenario: scenarios.Scenario, generator: runner.Generator) -> None:
    if scenario.needs_c and not generator.in_c:
        lacking("needs a C compiler")
    arguments = [*scenario.arguments.format(rate=1).split(), "--mqtt-version", str(scenario.mqtt)]
    unused = str(runner.free_port())
    done = subprocess.run([*generator.command, "--port", unused, *arguments], capture_output=True, text=True)
    assert "refused" in (done.stdout + done.stderr).lower() or '"connect_failures":10' in done.stdout, done.stderr


def result(broker: str, cpu: float, **more: Any) -> dict[str, Any]:
    return {"scenario_name": "p2p-q0-1k", "broker": broker, "ok": True, "cpu_us_per_delivered": cpu, **more}


def test_figures_are_medians_of_correct_runs() -> None:
    runs = [result("a", 1), result("a", 9), result("a", 2), result("b", 4), result("b", 0.1, ok=False, lost=3)]
    row = report.table(runs, scenarios.chosen("p2p-q0-1k"), ["a", "b"]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "p2p-q0-1k",
        "CPU µs/message",
        "2.00",
        "4.00",
        "0.50",
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [({"lost": 1}, "lost"), ({"misordered": 1}, "misordered"), ({"error": "not offered"}, "–"), ({}, "stalled"),
     ({"error": "did not start"}, "failed"), ({"qos": 1, "dup": 5, "unacked": 1}, "unacked")],
)  # fmt: skip
def test_a_failed_run_has_no_figure(error: dict[str, Any], shown: str) -> None:
    runs = [result("a", 1), result("b", 0.1, ok=False, **error)]
    row = report.table(runs, scenarios.chosen("p2p-q0-1k"), ["a", "b"]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == ["1.00", shown, ""]


def test_no_round_begins_that_would_exceed_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rounds = [0.0], []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])

    class Slow:
        def round(self, chosen: object, number: int, report: object) -> None:
            rounds.append(number)
            clock[0] += 100

    run.measure(Slow(), run.parse(["--rounds", "9", "--minutes", "6"]), 0.0, 6.0)  # type: ignore[arg-type]
    assert rounds == [0, 1, 2]


def test_an_unknown_scenario_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--scenarios", "p2p-q0-64 nonsense"])
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.slow(reason="starts several brokers")
def test_the_other_scripts_give_their_figures(tmp_path: Path, generator: runner.Generator) -> None:
    small = {
        "pauses.py": ("--clients", "20", "--rate", "200", "--seconds", "0.2"),
        "bystanders.py": ("--seconds", "0.2", "--rounds", "1", "--retained", "500"),
    }
    for script, arguments in small.items():
        if script in ("pauses.py", "bystanders.py") and not generator.in_c:
            continue
        done = subprocess.run([sys.executable, str(BENCH / script), *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "nan" not in done.stdout and done.stdout.count("\n|") > 3


# --- Spark ----------------------------------------------------------------------------------------------------------


def test_the_log_for_spark_has_the_rows_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "SEGMENT_BYTES", 400_000)
    spark.fill(tmp_path / "data", 9_000)
    spark.sealed_copy(tmp_path / "data", tmp_path / "sealed")
    found = LogReader(tmp_path / "data", spark.STREAM).arrow_records()
    assert len(list((tmp_path / "sealed").rglob("*.parquet"))) >= spark.PARTITIONS
    assert LogReader(tmp_path / "sealed", spark.STREAM).arrow_records() == found
    assert len(found) == 9_000 and {len(record.payload) for record in found} == {spark.PAYLOAD}
    assert {json.loads(record.payload)["n"] for record in found} == set(range(9_000))
    assert {record.partition for record in found} == set(range(spark.PARTITIONS))


FAKE = """
import json, sys
rows = int(sys.argv[sys.argv.index("--rows") + 1])
for broker, rate in (("mqttbroker", 800_000), ("Parquet files", 1_000_000)):
    print(json.dumps({"scenario_name": sys.argv[-1], "broker": broker, "round": 0, "ok": rows == 4_000, "rows_per_s": rate}))
"""


def test_spark_figures_are_compared_with_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark.py").write_text(FAKE)
    monkeypatch.setattr(run, "HERE", tmp_path)
    options = run.parse(["--scenarios", "spark-path", "--scale", "0.001"])
    runs = run.measure_spark(options, ["spark-path"], 1.0)
    first = report.table(runs, options.chosen, ["mqttbroker", scenarios.PARQUET]).splitlines()[2]
    assert [cell.strip() for cell in first.strip("|").split("|")] == [
        "spark-path",
        "rows/s ↑",
        "800,000",
        "1,000,000",
        "0.80",
    ]


@pytest.mark.slow("starts eight brokers")
def test_sizes_of_readings_sessions_and_messages(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "sizing.py"), "--data-dir", str(tmp_path), "--readings", "4000", "--devices", "50"]
    command += ["--segment-bytes", "64KiB", "--queued", "3000", "--retained", "3000"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {figures.pop("figure"): figures for figures in map(json.loads, done.stdout.splitlines())}
    assert list(found) == ["segments", "sealed", "sessions", "queued", "retained"]
    assert found["segments"]["payload_bytes"] < found["segments"]["bytes_each"]
    assert 0 < found["sealed"]["bytes_each"] < found["segments"]["bytes_each"] and found["sealed"]["readings"] > 1000
    assert all(found[what]["database_bytes_each"] > 0 for what in ("queued", "retained")), found
    assert list(tmp_path.iterdir()) == []
