"""pyiceberg's files on local disk, durable before the catalog names them: pyiceberg syncs none of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyiceberg.io import OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO

from bridge_spark.tables.output.data_files import SyncedFile


class SyncedFileIO(PyArrowFileIO):
    """pyiceberg's `FileIO` for any storage, with synced files on local disk."""

    def new_output(self, location: str) -> Any:
        output = super().new_output(location)
        return _SyncedOutput(location, output) if urlsplit(location).scheme in ("", "file") else output


class _SyncedOutput(OutputFile):
    def __init__(self, location: str, output: Any) -> None:
        super().__init__(location)
        self._output = output

    def __len__(self) -> int:
        return len(self._output)

    def exists(self) -> bool:
        return bool(self._output.exists())

    def to_input_file(self) -> Any:
        return self._output.to_input_file()

    def create(self, overwrite: bool = False) -> Any:
        path = Path(self.location.removeprefix("file://"))
        if overwrite:
            path.unlink(missing_ok=True)
        return SyncedFile(path)
