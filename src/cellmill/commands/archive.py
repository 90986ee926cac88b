"""archive: shards of a corpus in a fraction of their size, for keeping."""

from pathlib import Path

from cellmill.data.manifest import Manifest
from cellmill.data.shard_archive import archive_shards


def run(*, manifest: Path, out: Path) -> None:
    """Archive the shards of `manifest` in the folder `out`; goes on where a killed command ended."""
    shards = Manifest.read(manifest)
    archived = archive_shards(shards, out)
    stored = sum(shards.shard_path(file).stat().st_size for split in shards.splits.values() for file in split.files)
    as_float = max(1, sum(8 * split.nnz for split in shards.splits.values()))
    print(
        f"{out}: {archived / 1e9:.3f} GB of {stored / 1e9:.3f} GB of shards, {archived / as_float:.2f} of float32; "
        f"get them back with `cellmill unarchive --archive {out} --out FOLDER`"
    )
