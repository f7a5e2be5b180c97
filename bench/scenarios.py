"""The scenarios of ``make bench``: arguments of mqtt_load, and the settings of the broker.

One scale multiplies the numbers of clients and messages, so that a test can run the same scenarios in a second.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One row of the table: a title, and the key in mqtt_load's result, with slashes between levels."""

    title: str
    key: str
    higher_is_better: bool = False


CPU = Figure("CPU µs/message", "cpu_us_per_delivered")
RATE = Figure("messages/s", "delivered_per_s", True)
P99 = Figure("p99 latency µs", "latency_us/p99")
ACKS = Figure("acknowledged/s", "published_per_s", True)
ACK_P50 = Figure("p50 acknowledgement µs", "ack_us/p50")
ACK_P99 = Figure("p99 acknowledgement µs", "ack_us/p99")
QUEUED_CPU = Figure("CPU µs/message queued", "cpu_us_per_published")
DISK = Figure("bytes to disk/message", "disk_bytes_per_published")
SYNCS = Figure("syncs/message", "syncs_per_published")
SPARK = (
    Figure("rows/s", "rows_per_s", True), Figure("CPU s/million rows", "cpu_s_per_m"),
    Figure("of the JVM", "jvm_s_per_m"), Figure("of Python", "python_s_per_m"), Figure("of the broker", "broker_s_per_m"),
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """One load; ``{rate}`` in ``arguments`` is half the rate per publisher of the slowest broker in ``half_of``."""

    name: str
    arguments: str
    figures: tuple[Figure, ...] = (CPU,)
    mqtt: int = 4
    transport: str = "tcp"
    guarded: bool = False
    """With passwords, ACL, metrics and, for this broker, a stream of other topics."""
    stream: str = ""
    """Filter of this broker's stream; other brokers have none and take part only if ``guarded``."""
    durable: bool = False
    """The disk decides: this broker also runs with durability off, no process is pinned to a core, and CPU time, bytes and
    syncs include a rest after the load."""
    half_of: str = ""
    stretch: int = 1
    """Factor of the duration, for queues that have to grow to their limit."""
    needs_c: bool = True
    """py_load.py does not have this scenario."""
    spark: bool = False
    """Measured by spark.py."""
    workers: bool = False
    """This broker also runs with connection workers: as many as there are CPUs, less one."""
    links: bool = False
    """Measured by links.py."""
    streams: bool = False
    """Measured by streams.py."""

    @property
    def timed(self) -> bool:
        """Whether the run ends after a duration, not after a number of messages or clients."""
        return not any(option in self.arguments for option in ("--count", "--idle-clients", "--connect-storm"))


PAIRS = "--scenario p2p --publishers 10 --subscribers 10"
ELSEWHERE = "elsewhere/#"
EVERYTHING = "load/#"


def simple() -> list[Scenario]:
    sizes = {"64": "--size 64", "1k": "--size 1024"}
    found = [
        Scenario(f"p2p-q{qos}-{size}", f"{PAIRS} {option} --qos {qos}", (CPU, RATE) if size == "64" else (CPU,),
                 needs_c=qos == 2)
        for qos in (0, 1, 2) for size, option in sizes.items()
    ]  # fmt: skip
    found += [
        Scenario("fanout100-q0", "--scenario fanout --publishers 1 --subscribers 100 --qos 0", needs_c=False),
        Scenario("fanout100-q1", "--scenario fanout --publishers 1 --subscribers 100 --qos 1", needs_c=False),
        Scenario("fanin100-q0", "--scenario fanin --publishers 100 --subscribers 1 --qos 0", needs_c=False),
        Scenario("fanin100-q1", "--scenario fanin --publishers 100 --subscribers 1 --qos 1", stretch=3, needs_c=False),
        Scenario("shared4-q1", "--scenario shared --publishers 10 --subscribers 4 --qos 1"),
    ]
    for qos in (0, 1):
        arguments = f"{PAIRS} --qos {qos} --rate {{rate}}"
        found.append(Scenario(f"half-load-q{qos}", arguments, (CPU, P99), half_of=f"p2p-q{qos}-64", needs_c=False))
    return found


def crowds(scale: float) -> list[Scenario]:
    def number(full: int) -> int:
        return max(int(full * scale), 10)

    pairs = number(1000)
    return [
        Scenario("fanout1000-q0", f"--scenario fanout --publishers 1 --subscribers {number(1000)} --qos 0"),
        Scenario("pairs1000-q0", f"--scenario p2p --publishers {pairs} --subscribers {pairs} --qos 0 --rate 10",
                 (CPU, P99), needs_c=False),
        Scenario("storm5000", f"--connect-storm {number(5000)} --concurrency 100",
                 (Figure("connections/s", "connects_per_s", True), Figure("CPU µs/connection", "cpu_us_per_connect"))),
        Scenario("idle10000", f"--idle-clients {number(10000)} --idle-subscribe --publishers 0 --concurrency 100",
                 (Figure("KiB/client", "rss_kb_per_client"),)),
        Scenario("retained100k", f"--scenario retained --publishers 10 --count {number(100_000) // 10} --qos 1"
                 " --window 1000 --subscribe-qos 0", (CPU, RATE, Figure("stored/s", "published_per_s", True))),
    ]  # fmt: skip


def other_wires() -> list[Scenario]:
    return [
        Scenario("v5-q0", f"{PAIRS} --qos 0", mqtt=5, needs_c=False),
        Scenario("v5-properties-q0", f"{PAIRS} --qos 0 --properties", mqtt=5),
        Scenario("v5-properties-q1", f"{PAIRS} --qos 1 --properties", mqtt=5),
        Scenario("v5-alias-q0", f"{PAIRS} --qos 0 --alias", mqtt=5),
        Scenario("tls-q0", f"{PAIRS} --qos 0 --tls", transport="tls"),
        Scenario("tls-q1", f"{PAIRS} --qos 1 --tls", transport="tls"),
        Scenario("ws-q0", f"{PAIRS} --qos 0 --websocket", transport="ws"),
        Scenario("ws-q1", f"{PAIRS} --qos 1 --websocket", transport="ws"),
    ]


def kept(scale: float) -> list[Scenario]:
    def count(full: int) -> int:
        return max(int(full * scale), 10)

    away = "--scenario offline --stall 20"
    ten = f"{away} --publishers 10 --subscribers 10"
    drained = Figure("CPU µs/message drained", "cpu_us_per_delivered")
    offline = (ACKS, ACK_P99, QUEUED_CPU, DISK, Figure("drained/s", "delivered_per_s", True), drained)
    paced = (ACK_P50, ACK_P99, QUEUED_CPU, DISK)
    found = [
        Scenario("durable-q1", f"{PAIRS} --qos 1 --clean 0", (ACKS, CPU, ACK_P99, DISK), durable=True, needs_c=False),
        Scenario("durable-q2", f"{PAIRS} --qos 2 --clean 0", (ACKS, CPU, ACK_P99, DISK), durable=True),
        Scenario("durable-q1-window1", f"{PAIRS} --qos 1 --clean 0 --window 1 --max-undelivered 1", (ACK_P50, ACK_P99),
                 durable=True),
        Scenario("offline-q1", f"{ten} --qos 1 --window 1000 --count {count(50_000)}", offline, durable=True),
        Scenario("offline-q2", f"{ten} --qos 2 --window 1000 --count {count(10_000)}", offline, durable=True),
        Scenario("offline-q1-window1", f"{ten} --qos 1 --window 1 --count {count(100)}", (ACK_P50, ACK_P99),
                 durable=True),
        Scenario("paced-offline-q1", f"{ten} --qos 1 --rate 100 --count {count(300)}", paced, durable=True),
        Scenario("paced-q2", f"{PAIRS} --qos 2 --clean 0 --rate 100", paced, durable=True, stretch=3),
        Scenario("streamed-q0", f"{PAIRS} --qos 0", (CPU, RATE, DISK), stream=EVERYTHING, durable=True, needs_c=False),
        Scenario("streamed-q1", f"{PAIRS} --qos 1", (CPU, ACKS, ACK_P99, DISK), stream=EVERYTHING, durable=True,
                 needs_c=False),
        Scenario("streamed-offline-q1", f"{ten} --qos 1 --window 1000 --count {count(50_000)}", offline,
                 stream=EVERYTHING, durable=True),
    ]  # fmt: skip
    one_by_one = f"{away} --publishers 1 --subscribers 1 --window 1 --count {count(1000)}"
    found += [
        Scenario(f"one-by-one{streamed}-q{qos}", f"{one_by_one} --clean 0 --qos {qos}", (SYNCS, ACK_P50, ACK_P99, DISK),
                 stream=EVERYTHING if streamed else "", durable=True)
        for streamed in ("", "-streamed") for qos in (1, 2)
    ]  # fmt: skip
    return found


def featured() -> list[Scenario]:
    loads = {
        "q0": f"{PAIRS} --qos 0",
        "q1": f"{PAIRS} --qos 1",
        "fanout100-q0": "--scenario fanout --publishers 1 --subscribers 100 --qos 0",
        "fanin100-q0": "--scenario fanin --publishers 100 --subscribers 1 --qos 0",
    }
    return [Scenario(f"features-{name}", arguments, guarded=True, stream=ELSEWHERE) for name, arguments in loads.items()]


CORE = Figure("CPU µs/message of the core", "core_us_per_delivered")
WORKERS = Figure("of the workers", "workers_us_per_delivered")
CORE_SHARE = Figure("core % of a CPU", "core_cpu_pct")


def with_workers(scale: float) -> list[Scenario]:
    """Loads of the broker with and without connection workers, those of single messages after those of many."""

    def number(full: int) -> int:
        return max(int(full * scale), 10)

    pairs = f"--scenario p2p --publishers {number(1000)} --subscribers {number(1000)}"
    both = (CPU, CORE, WORKERS)
    p50 = Figure("p50 latency µs", "latency_us/p50")
    loads = {
        "p2p-q0": (f"{PAIRS} --qos 0", both),
        "p2p-q1": (f"{PAIRS} --qos 1", both),
        "fanin100-q0": ("--scenario fanin --publishers 100 --subscribers 1 --qos 0", both),
        "fanout100-q0": ("--scenario fanout --publishers 1 --subscribers 100 --qos 0", both),
        "pairs1000-q0": (f"{pairs} --qos 0 --rate 10", both),
        "pairs1000-q1": (f"{pairs} --qos 1 --rate 10", both),
        BUSY_WORKER: (f"{pairs} --qos 0 --rate 50", (*both, RATE)),
        "storm5000": (f"--connect-storm {number(5000)} --concurrency 100",
                      (Figure("CPU µs/connection", "cpu_us_per_connect"), Figure("of the core", "core_us_per_connect"))),
        "idle10000": (f"--idle-clients {number(10_000)} --idle-subscribe --publishers 0 --concurrency 100",
                      (Figure("KiB/client", "rss_kb_per_client"), Figure("of the core", "core_kib_per_client"),
                       Figure("of its worker", "workers_kib_per_client"))),
        "low-load-q0": (f"{PAIRS} --qos 0 --rate 20", (p50, P99)),
    }  # fmt: skip
    found = [Scenario(f"workers-{name}", arguments, figures, workers=True) for name, (arguments, figures) in loads.items()]
    for qos in (0, 1):
        found.append(Scenario(f"workers-half-load-q{qos}", f"{PAIRS} --qos {qos} --rate {{rate}}", (p50, P99),
                              half_of=f"workers-p2p-q{qos}", workers=True))  # fmt: skip
    return found


BUSY_WORKER = "pairs1000-busy-q0"
"""The scenario that tells what a busy worker takes for a message."""
BATCHES = (1, 4, 16, 64)
"""Messages per read of a link."""
WORKER_COUNTS = (1, 2, 4, 8, 16)


def link_scenarios() -> list[Scenario]:
    """What links.py measures."""
    alone = Figure("÷ QoS 0 alone", "of_alone")
    found = []
    for qos in (0, 1):
        found.append(Scenario(f"direct-q{qos}", "", (CORE,), links=True))
        found += [Scenario(f"link-q{qos}-{batch}", "", (CORE, alone), links=True) for batch in BATCHES]
    idle = (Figure("KiB/client of the core", "core_kib_per_client"), Figure("CPU µs/CONNECT", "core_us_per_idle_connect"))
    found.append(Scenario("link-idle", "", idle, links=True))
    fed = (Figure("offered/s", "offered_per_s"), RATE, CORE, CORE_SHARE, Figure("load % of a CPU", "self_cpu_pct"),
           Figure("messages/write", "messages_per_write"), Figure("messages/s of a full core", "core_rate"),
           Figure("busy workers of a full core", "workers_fed"))  # fmt: skip
    return [*found, *(Scenario(f"capacity-{count}", "", fed, links=True) for count in WORKER_COUNTS)]


def stream_scenarios() -> list[Scenario]:
    """What streams.py measures."""
    names = ("catch-up-active", "catch-up-v5", "catch-up-qos1", "catch-up-sealed")
    live = (
        Figure("p99 ms alone", "quiet_p99_ms"), Figure("beside readers of another broker", "control_p99_ms"),
        Figure("beside readers", "loaded_p99_ms"), Figure("÷ alone", "loaded_to_quiet"),
        Figure("÷ beside another's", "loaded_to_control"), Figure("MB/s to the readers", "loaded_mb_per_s", True),
    )  # fmt: skip
    cost = (Figure("CPU µs/message, stored", "stored_us"), Figure("not stored", "not_stored_us"), Figure("added", "added_us"))
    peers = (RATE, CPU, Figure("messages per CPU second", "per_cpu_s", True))
    found = [(name, (RATE, CPU)) for name in names]
    found += [("bystanders-of-readers", live), ("append-cost", cost), ("stream-append", peers), ("stream-group", peers)]
    return [Scenario(name, "", figures, streams=True) for name, figures in found]


STREAM_PEERS = ("Redis always", "Redis everysec", "RabbitMQ quorum", "RabbitMQ stream")
"""The other servers of streams.py, by their names there."""
PARQUET = "Parquet files"
"""Spark's Parquet source with the same rows, in the column of a peer."""
SPARK_READS = {
    f"spark-{how}{sealed}{few}": (f"{how}{sealed}", bool(few))
    for sealed in ("", "-sealed") for how in ("path", "url") for few in ("", "-3")
}  # fmt: skip
"""Scenario -> (how the stream is read, whether only topic, payload and timestamp are)."""
SPARK_INGEST, SPARK_LATENCY = "spark-ingest", "spark-latency"
SPARK_WRITES = {"spark-write": "once", "spark-write-plain": "plain"}
"""Scenario -> the stream that rows are written to, with deduplication and without."""


def spark_scenarios() -> list[Scenario]:
    found = [Scenario(name, "", (*SPARK, Figure("broker % of a core", "broker_cpu_pct")) if how.startswith("url") else SPARK, spark=True)
             for name, (how, _) in SPARK_READS.items()]  # fmt: skip
    seen = (Figure("p50 until seen ms", "p50_ms"), Figure("p95 until seen ms", "p95_ms"))
    found += [Scenario(name, "", SPARK, spark=True) for name in (SPARK_INGEST, *SPARK_WRITES)]
    return [*found, Scenario(SPARK_LATENCY, "", seen, spark=True)]


GROUPS: dict[str, list[str]] = {
    "quick": ["p2p-q0-64", "p2p-q1-64", "fanout100-q0", "fanin100-q0", "pairs1000-q0", "durable-q1", "features-q1"],
    "wires": [scenario.name for scenario in other_wires()],
    "kept": [scenario.name for scenario in kept(1)],
    "commit": [
        "durable-q1",
        "durable-q2",
        "offline-q1",
        "streamed-offline-q1",
        "paced-offline-q1",
        "paced-q2",
        "one-by-one-q1",
        "one-by-one-q2",
        "one-by-one-streamed-q1",
        "one-by-one-streamed-q2",
    ],
    "features": [scenario.name for scenario in featured()],
    "workers": [scenario.name for scenario in (*with_workers(1), *link_scenarios())],
    "spark": [scenario.name for scenario in spark_scenarios()],
    "streams": [scenario.name for scenario in stream_scenarios()],
}


def all_scenarios(scale: float = 1.0) -> dict[str, Scenario]:
    """The scenarios of mqtt_load by name, in the order in which they run."""
    found = simple() + crowds(scale) + other_wires() + kept(scale) + featured() + with_workers(scale)
    return {scenario.name: scenario for scenario in found}


def chosen(names: str, scale: float = 1.0) -> list[Scenario]:
    """The scenarios of a list of names and groups, separated by commas or spaces; "all" is all but the groups "workers" and
    "streams".

    Raises ValueError.
    """
    elsewhere = (*link_scenarios(), *spark_scenarios(), *stream_scenarios())
    known = {**all_scenarios(scale), **{scenario.name: scenario for scenario in elsewhere}}
    wanted: list[str] = []
    for name in names.replace(",", " ").split():
        if name != "all" and name not in GROUPS and name not in known:
            raise ValueError(f"unknown scenario {name!r}; there are {', '.join([*known, *GROUPS, 'all'])}")
        wanted += set(known).difference(GROUPS["workers"], GROUPS["streams"]) if name == "all" else GROUPS.get(name, [name])
    return [scenario for name, scenario in known.items() if name in wanted]
