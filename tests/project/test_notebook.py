"""The notebook of docs/notebooks runs from first to last cell; asserts in its cells check the results."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.class_archive import QUICK_JVM
from support.paths import ROOT
from support.spark_session import python_path
from support.worker_fork_server import worker_python

nbclient = pytest.importorskip("nbclient", reason="pip install 'mqttbroker[notebook]'")
nbformat = pytest.importorskip("nbformat")
pytestmark = pytest.mark.one_build

NOTEBOOK = ROOT / "docs" / "notebooks" / "anomalies.ipynb"


def test_notebook_is_committed_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    assert len(cells) > 5 and all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENSOR_DATA", raising=False)
    monkeypatch.setenv("PICTURES", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_JVM)
    monkeypatch.setenv("PYSPARK_PYTHON", worker_python(python_path()))
    if python_path():
        monkeypatch.setenv("PYTHONPATH", python_path())
    (tmp_path / "examples").symlink_to(ROOT / "docs" / "examples")
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path / "notebooks"}}
    ).execute()
    shown = [
        output.data["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert shown[0] == "'4 sensors, 4,000 readings'"
    assert [line.split()[1:] for line in shown[1].splitlines()[2:]] == [["1000", "6"], ["1000", "0"], ["1000", "12"], ["1000", "0"]]
    assert (tmp_path / "anomalies.png").read_bytes().startswith(b"\x89PNG")
