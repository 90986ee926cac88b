"""Files of shards whose bytes have been hashed, with the size and time that each had then: verified.json."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.data.manifest import IndexEntry, Manifest, ShardEntry, verify
from cellmill.errors import DataError
from cellmill.files import read_json, write_json

READ = ("train", "val")  # splits that a training reads


def files_of_training(manifest: Manifest) -> list[ShardEntry | IndexEntry]:
    """Every shard that a training reads, and the arrays beside them."""
    return [file for split in READ for file in manifest.splits[split].files]


def verify_once(manifest: Manifest) -> None:
    """Hash the files of a training, unless they are as when they were last hashed.

    Raises DataError naming a damaged one.
    """
    if unknown := unverified(manifest, files_of_training(manifest)):
        verify(manifest, unknown)
        record(manifest)


def unverified(manifest: Manifest, files: list[ShardEntry | IndexEntry]) -> list[ShardEntry | IndexEntry]:
    """Those of `files` whose size or time is not as in verified.json."""
    known = _known(_record(manifest), manifest.fingerprint)
    return [file for file in files if known.get(file.name) != _stamp(manifest.shard_path(file))]


def record(manifest: Manifest) -> None:
    """Write verified.json, with all files of a training, which have been hashed."""
    stamps = {file.name: _stamp(manifest.shard_path(file)) for file in files_of_training(manifest)}
    with suppress(OSError):  # a corpus that only its owner can write to: hashed at each start
        write_json(_record(manifest), {"fingerprint": manifest.fingerprint, "files": stamps})


def _record(manifest: Manifest) -> Path:
    return manifest.path.with_name("verified.json")


def _known(record: Path, fingerprint: str) -> dict[str, Any]:
    """Stamps of the files when they were last hashed, by name; none if they are of another corpus."""
    try:
        tree = read_json(record)
        return dict(tree["files"]) if tree["fingerprint"] == fingerprint else {}
    except (DataError, OSError, KeyError, TypeError, ValueError):
        return {}


def _stamp(path: Path) -> list[int] | str:
    """Size and time of a file; `gone` without it."""
    try:
        return [path.stat().st_size, path.stat().st_mtime_ns]
    except FileNotFoundError:
        return "gone"
