"""Opening the input of a dataset: a file or folder of any format, a FASTA file, or any of these at a URL."""

import hashlib
from pathlib import Path
from typing import Any

from cellmill.config.corpus import is_fasta
from cellmill.config.input_url import is_url, redacted
from cellmill.data.counts_reader import CountsReader
from cellmill.data.fasta import FastaReader
from cellmill.data.fetch import RECORD, fetch, read_record
from cellmill.data.h5_probe import check_walk
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file


def open_dataset(path: Path, counts: str = "X") -> CountsReader:
    """Open the matrix `counts` of a local input. Raises DataError."""
    if not is_fasta(path):
        check_walk([path])
        return open_counts(path, counts)
    if counts != "X":
        raise ConfigError(f"{path}: a FASTA file has no matrix {counts!r}; leave the dataset's `counts` empty")
    return FastaReader(path)


def local_input(given: Path | str, cache: Path | None = None) -> Path:
    """Local path of an input: itself, the fetched copy of a URL, or the copy that a record of `fetch` names.

    A copy that is gone is fetched again. Raises DataError if it is then another file than the record's.
    """
    if isinstance(given, str) and is_url(given):
        return fetch(given, cache).path
    path = Path(given)
    if not path.name.endswith(RECORD):
        return path
    record = read_record(path)
    if record.path.exists():
        return record.path
    again = fetch(record.url, cache)
    if again.sha256 != record.sha256:
        raise DataError(f"{redacted(record.url)}: is another file than when {path} was written; delete that and rerun")
    return again.path


def origin_of(path: Path) -> dict[str, Any]:
    """Name, SHA-256 and size of a local input, for reports; of a folder over its files by name."""
    if path.is_file():
        return {"file": path.name, "sha256": sha256_file(path), "bytes": path.stat().st_size}
    whole, size = hashlib.sha256(), 0
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole.update(f"{sha256_file(file)}  {file.relative_to(path).as_posix()}\n".encode())
        size += file.stat().st_size
    return {"file": path.name, "sha256": whole.hexdigest(), "bytes": size}
