"""The HTTP API as its document describes it: schemathesis calls every operation of a broker, validly and not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

pytestmark = pytest.mark.one_build
TOKEN = "s3cret"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with users, rules, a client, a retained message, and a stream."""
    backups = tmp_path_factory.mktemp("backups")
    http = {"token": TOKEN, "backup_dir": str(backups)}
    files = {name: str(backups.parent / name) for name in ("password_file", "acl_file")}
    Path(files["password_file"]).write_text("")
    Path(files["acl_file"]).write_text("topic readwrite #\n")
    streams = {"plant": {"filters": ["plant/#"]}}
    with BrokerProcess(config={"http": http, "streams": streams, "allow_anonymous": True, **files}) as broker:
        with RawClient(broker.port) as client:
            client.connect("dev")
            client.subscribe("plant/#")
            client.publish("plant/1", b"21.5", qos=1, retain=True)
            yield broker


@pytest.fixture(scope="module")
def api_schema(api: BrokerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{api.url}/api/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
def test_each_operation_answers_as_the_document_says(api_schema: Any, mode: GenerationMode) -> None:
    operations = [result.ok() for result in api_schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        if operation.path.endswith("/trace"):
            continue  # its answer takes as long as it is asked to
        if not (operation.path_parameters or operation.query or operation.body) and mode is GenerationMode.NEGATIVE:
            continue  # nothing can be wrong

        @seed(1)
        @settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            checks = list(CHECKS)
            if case.path.startswith("/api/"):  # the older paths take any query
                checks += [negative_data_rejection, positive_data_acceptance]
            case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, checks=checks)

        check()


@pytest.mark.slow("minutes of generated requests, and sequences of them")
@pytest.mark.timeout(1200)
def test_many_requests_and_sequences_of_them(api: BrokerProcess, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{api.url}/api/v1/openapi.json",
        "--header", f"Authorization: Bearer {TOKEN}", "--max-examples", "60", "--continue-on-failure", "--no-color",
        "--include-path-regex", "^/api/", "--exclude-path-regex", "/trace$", "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "negative_data_rejection,positive_data_acceptance,ignored_auth,unsupported_method",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100)
    assert done.returncode == 0, "\n".join(line[:500] for line in done.stdout.splitlines())
