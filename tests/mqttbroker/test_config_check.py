"""check-config beyond values: files, the data directory, and whether anybody can log in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.certificates import CertificateFiles
from support.command_line import one_line, run

TLS = '[[listeners]]\ntype = "tls"\nport = 0\ncertfile = "{directory}/server.pem"\nkeyfile = "{directory}/server.key"\n'

PROBLEMS = [
    (TLS, r"listeners\.0: certfile .*server\.pem: No such file"),
    ('http.certfile = "{directory}/none.pem"\nhttp.keyfile = "{directory}/none.key"', r"http: certfile .*none\.pem: No such file"),
    ('http.token_file = "{directory}/token"', r"http\.token_file: .*/token: No such file"),
    ('data_dir = "{directory}/file/data"', r"data_dir: .*/file is not a directory"),
    ("allow_anonymous = false", r"listeners\.0: no client can connect: allow_anonymous is false"),
    ('http.host = "0.0.0.0"', r"http\.token: is required, or token_file, or \[\[http\.access\]\], when the server can be reached at 0\.0\.0\.0"),
    ('http.host = ""', r"http\.token: is required, or token_file, or \[\[http\.access\]\], when the server can be reached at every address"),
    ('[[http.access]]\nname = "a"\nrole = "viewer"\ntoken_file = "{directory}/none"',
     r"http\.access\.0\.token_file: .*none: No such file"),
    ('http.access = [{{name = "a b", role = "viewer", token = "x"}}]', r"http\.access\.0\.name: must be the name of"),
    ('http.access = 5', r"http\.access: must be \[\[http\.access\]\] tables"),
    ('http.token = "a"\nhttp.token_file = "{directory}/file"', r"http\.token_file: token is set, too"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "problem"), PROBLEMS)
def test_problem_is_one_line_with_file_and_key(tmp_path: Path, config: str, problem: str) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "broker.toml"
    path.write_text(config.format(directory=tmp_path))
    done = run("check-config", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(problem, one_line(done.stderr)) and "broker.toml" in done.stderr


def test_complete_configuration_is_fine(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "broker.toml").write_text(
        f'[http]\nhost = ""\ntoken_file = "{tmp_path}/token"\n[[listeners]]\ntype = "tls"\nport = 0\n'
        f'certfile = "{files.certfile}"\nkeyfile = "{files.keyfile}"\n'
    )
    done = run("check-config", "broker.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
