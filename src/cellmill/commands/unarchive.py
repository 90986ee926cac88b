"""unarchive: shards as they were before `archive`, byte for byte."""

from pathlib import Path

from cellmill.data.manifest import Manifest
from cellmill.data.shard_archive import restore_shards


def run(*, archive: Path, out: Path) -> None:
    """Restore the shards of the folder `archive` in `out`; goes on where a killed command ended."""
    n = restore_shards(Manifest.read(archive / "manifest.json"), out)
    print(f"{out}: {n:,} files, each with the SHA-256 of the manifest")
