"""Streams that are created, altered and deleted while a broker runs, over its API and by commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess
from support.command_line import run
from support.core import wait_until
from support.raw_client import RawClient

from bridge_spark.log.check import check_partition
from bridge_spark.log.record_batch import decode_messages, iter_batches
from mqttbroker.admin.data.repair import check
from mqttbroker.cli.main import main

pytestmark = pytest.mark.one_build
Start = Callable[..., BrokerProcess]
CONFIG = {"http": {"access": ACCESS}, "streams": {"plant": {"filters": ["plant/#"], "partitions": 2}}}


def create(api: Api, name: str = "lab", **settings: Any) -> None:
    status, answer = api.ask("POST", "/streams", {"name": name, "filters": ["lab/#"], "partitions": 1, **settings})
    assert status == 200, answer


def publish(broker: BrokerProcess, *payloads: str, topic: str = "lab/1") -> None:
    with RawClient(broker.port) as client:
        client.connect("publisher")
        for payload in payloads:
            client.publish(topic, payload.encode(), qos=1)


def stored(broker: BrokerProcess, name: str = "lab") -> list[tuple[int, str]]:
    """Offsets and payloads of the records of a stream with one partition."""
    manifest = json.loads(broker.get(f"/streams/{name}", {"Authorization": "Bearer t-admin"}))
    (part,) = manifest["partitions"]
    found = []
    for segment in part["segments"]:
        data = (broker.data_dir / "streams" / name / "0" / segment["file"]).read_bytes()[: segment["bytes"]]
        for batch in iter_batches(data):
            found += [(offset, message.payload.decode()) for offset, message in enumerate(decode_messages(data, batch), batch.first_offset)]
    return found


@pytest.fixture
def broker(start_broker: Start) -> BrokerProcess:
    return start_broker(config=CONFIG)


@pytest.fixture
def api(broker: BrokerProcess) -> Api:
    return Api(broker)


@pytest.mark.parametrize("kill", [True, False])
def test_a_created_stream_stores_at_once_and_after_restarts(broker: BrokerProcess, api: Api, kill: bool) -> None:
    publish(broker, "before")
    create(api, retention_age="7d", retention_bytes="1GiB")
    publish(broker, "a", "b")
    assert stored(broker) == [(0, "a"), (1, "b")]
    broker.restart(kill)
    publish(broker, "c")
    assert stored(broker) == [(0, "a"), (1, "b"), (2, "c")]
    shown = api.get("/streams/lab")
    assert (shown["source"], shown["filters"]) == ("created", ["lab/#"])
    assert (shown["settings"]["retention_age"], shown["settings"]["retention_bytes"]) == (604800.0, 1 << 30)
    assert api.get("/streams/plant")["source"] == "file"
    broker.wait_for_log("event=admin action=create_stream target=.*name=lab .*retention_age=7d.* user=admin role=admin")


def test_changed_filters_apply_to_what_comes_after(broker: BrokerProcess, api: Api) -> None:
    create(api)
    publish(broker, "old")
    assert api.ask("PATCH", "/streams/lab", {"filters": ["field/#"], "retention_age": "1h"})[0] == 200
    publish(broker, "not stored")
    publish(broker, "new", topic="field/1")
    assert stored(broker) == [(0, "old"), (1, "new")]
    broker.restart(kill=True)
    publish(broker, "newer", topic="field/2")
    assert stored(broker) == [(0, "old"), (1, "new"), (2, "newer")]
    shown = api.get("/streams/lab")
    assert (shown["filters"], shown["past_filters"]) == (["field/#"], ["lab/#"])
    assert shown["settings"]["retention_age"] == 3600.0


def test_a_deleted_stream_is_gone_and_a_new_one_continues_its_offsets(broker: BrokerProcess, api: Api) -> None:
    create(api, dedup=True)
    publish(broker, "a", "b", "c")
    assert api.ask("DELETE", "/streams/lab", confirm="lab") == (204, None)
    assert api.ask("GET", "/streams/lab")[0] == 404
    assert [stream["name"] for stream in api.get("/streams")["items"]] == ["plant"]
    publish(broker, "nowhere")
    broker.restart(kill=True)
    assert api.ask("GET", "/streams/lab")[0] == 404
    create(api)
    publish(broker, "d")
    assert stored(broker) == [(3, "d")]
    broker.restart(kill=True)
    publish(broker, "e")
    assert stored(broker) == [(3, "d"), (4, "e")]
    broker.terminate()
    assert check(broker.data_dir).problems == []


def test_changes_are_refused_with_a_reason(broker: BrokerProcess, api: Api) -> None:
    create(api)
    body = {"name": "lab", "filters": ["x/#"]}
    assert "already" in api.refused(409, "name", "POST", "/streams", body)
    assert "already" in api.refused(409, "name", "POST", "/streams", {**body, "name": "plant"})
    assert "configuration file" in api.refused(409, "name", "DELETE", "/streams/plant", confirm="plant")
    assert "configuration file" in api.refused(409, "name", "PATCH", "/streams/plant", {"filters": ["y"]})
    assert "once more" in api.refused(409, "confirm", "DELETE", "/streams/lab", confirm="la")
    api.refused(400, "partitions", "PATCH", "/streams/lab", {"partitions": 8})
    api.refused(400, "archive", "POST", "/streams", {**body, "archive": "s3://x"})
    api.refused(400, "retention_age", "PATCH", "/streams/lab", {"retention_age": "soon"})
    api.refused(404, "name", "PATCH", "/streams/none", {"retention_age": "1d"})
    assert [stream["name"] for stream in api.get("/streams")["items"]] == ["lab", "plant"]


def test_a_reader_of_a_stream_that_is_created_later(start_broker: Start) -> None:
    reader = {"name": "reader", "role": "reader", "token": "t-reader", "streams": ["lab"]}
    broker = start_broker(config={**CONFIG, "http": {"access": [*ACCESS, reader]}})
    broker.wait_for_log("event=configuration_warning reason=.*there is no stream 'lab' yet")
    assert Api(broker, "reader").ask("GET", "/streams/lab")[0] == 404
    create(Api(broker))
    assert Api(broker, "reader").get("/streams/lab")["name"] == "lab"
    assert Api(broker, "reader").ask("GET", "/streams/plant")[0] == 403


def test_the_number_of_created_streams_is_limited(start_broker: Start) -> None:
    api = Api(start_broker(config={**CONFIG, "max_created_streams": 1}))
    create(api)
    assert "max_created_streams" in api.refused(409, None, "POST", "/streams", {"name": "b", "filters": ["b"]})


def test_a_stream_of_the_file_is_altered_by_a_reload(start_broker: Start) -> None:
    text = '[http]\nport = 0\n[[http.access]]\nname = "a"\nrole = "admin"\ntoken = "t-admin"\n[streams.lab]\npartitions = 1\n'
    broker = start_broker(config=text + 'filters = ["lab/#"]\n')
    publish(broker, "a")
    broker.config.write_text(text + 'filters = ["field/#"]\nretention_age = "1d"\n')
    api = Api(broker)
    assert api.ask("POST", "/reload") == (200, {
        "problems": [], "applied": ["streams.lab.filters", "streams.lab.retention_age"], "restart_needed": [],
    })  # fmt: skip
    publish(broker, "nowhere")
    publish(broker, "b", topic="field/1")
    assert stored(broker) == [(0, "a"), (1, "b")]
    assert api.get("/streams/lab")["settings"]["retention_age"] == 86400.0


def test_a_backup_has_created_streams_and_none_of_the_records_of_deleted_ones(broker: BrokerProcess, api: Api, tmp_path: Path) -> None:
    create(api)
    create(api, "gone", filters=["gone/#"])
    publish(broker, "a")
    publish(broker, "x", topic="gone/1")
    assert api.ask("DELETE", "/streams/gone", confirm="gone")[0] == 204
    done = run("backup", str(tmp_path / "copy"), "--data-dir", str(broker.data_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    broker.terminate()
    with BrokerProcess(config=CONFIG, data_dir=tmp_path / "copy") as copy:
        assert stored(copy) == [(0, "a")]
        assert [stream["name"] for stream in Api(copy).get("/streams")["items"]] == ["lab", "plant"]
    assert not list((tmp_path / "copy" / "streams" / "gone" / "0").glob("*.seg"))


def test_kill_9_in_the_middle_of_changes(broker: BrokerProcess, api: Api) -> None:
    """Created or not, deleted or not: what was answered is so, and the broker starts with all files whole."""
    last = -1
    for number in range(6):
        answered = threading.Event()
        results: list[int] = []

        def change() -> None:
            try:
                for _ in range(50):
                    body = {"name": "lab", "filters": ["lab/#"], "partitions": 1}
                    results.append(api.ask("POST", "/streams", body)[0])
                    publish(broker, "a", "b")
                    results.append(api.ask("DELETE", "/streams/lab", confirm="lab")[0])
                    answered.set()
            except (OSError, AssertionError, EOFError):
                pass

        thread = threading.Thread(target=change)
        thread.start()
        assert answered.wait(30)
        broker.kill()
        thread.join()
        assert check(broker.data_dir).problems == []
        broker.start()
        if any(stream["name"] == "lab" for stream in api.get("/streams")["items"]):
            assert api.ask("DELETE", "/streams/lab", confirm="lab")[0] == 204
        create(api)
        publish(broker, f"round {number}")
        ((offset, payload),) = stored(broker)
        assert payload == f"round {number}" and offset > last  # an offset never has another record
        last = offset
        assert api.ask("DELETE", "/streams/lab", confirm="lab")[0] == 204


def test_deleting_while_messages_flow_and_segments_are_sealed(start_broker: Start) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}})
    api = Api(broker)
    stop = threading.Event()
    failures: list[Exception] = []

    def flow() -> None:
        try:
            with RawClient(broker.port) as client:
                client.connect("flow")
                while not stop.is_set():
                    for number in range(50):
                        client.publish(f"lab/{number}", b"x" * 200, qos=1)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=flow)
    thread.start()
    for _ in range(5):
        create(api, segment_bytes="1KiB")
        wait_until(lambda: failures or any((broker.data_dir / "streams/lab/0").glob("*.parquet")))
        assert not failures
        assert api.ask("DELETE", "/streams/lab", confirm="lab")[0] == 204
    stop.set()
    thread.join()
    assert not failures
    broker.terminate()
    assert check(broker.data_dir).problems == []
    state = check_partition(broker.data_dir / "streams" / "lab" / "0", None, False)
    assert state.start == state.end > 0


def test_the_commands(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MQTTBROKER_API_URL", broker.url)
    monkeypatch.setenv("MQTTBROKER_API_TOKEN", "t-admin")

    def call(*words: str) -> tuple[int, str, str]:
        try:
            status = main(["streams", *words])
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    assert call("create", "lab", "--filter", "lab/#", "--set", "partitions=1", "--set", "retention_age=7d")[0] == 0
    publish(broker, "21.5", "22")
    status, out, _ = call("tail", "lab", "-n", "1")
    assert status == 0 and out.split()[2:] == ["0:1", "lab/1", "22"]
    assert len(call("tail", "lab")[1].splitlines()) == 2
    assert call("alter", "lab", "--filter", "field/#", "--set", "retention_age=unlimited")[0] == 0
    shown = dict(line.split(maxsplit=1) for line in call("show", "lab")[1].splitlines() if len(line.split()) == 2)
    assert shown["filters"] == "field/#" and shown["source"] == "created" and "retention_age" not in shown
    assert [line.split()[0] for line in call()[1].splitlines()] == ["STREAM", "lab", "plant", "plant"]
    assert call("delete", "lab", "lob")[0] == 1
    assert call("delete", "lab", "lab")[0] == 0
    assert call("show", "lab")[0] == 1
    assert call("alter", "plant", "--set", "nonsense")[0] == 2
