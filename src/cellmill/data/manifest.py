"""The manifest of a corpus's shards: what they hold, and by what digests it is told that it is still so.

Written last of all files of a folder of shards: its existence means that they are complete. Needs no HDF5, so a
launcher can check a corpus without the memory that takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cellmill.data.split import SPLITS
from cellmill.errors import DataError
from cellmill.files import digest, read_json, sha256_file, write_json

FORMAT = 1
REMEDY = "make the shards again (the `shard` stage)"


@dataclass(frozen=True)
class ShardEntry:
    """What the manifest says of one shard."""

    name: str
    n_obs: int
    nnz: int
    dtype: str
    """Of the counts: uint16, or uint32 where a count is larger."""
    sha256: str
    """Of the file."""
    content: str
    """SHA-256 of cells, genes and counts alone: the same whatever library wrote the file."""


@dataclass(frozen=True)
class SplitEntry:
    """What the manifest says of one split."""

    n_obs: int
    nnz: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """manifest.json: written last, so its existence says that the shards beside it are complete."""

    path: Path
    fingerprint: str
    """Of everything that defines the data: cells, order, split and vocabulary; not of paths or library versions."""
    vocabulary: dict[str, Any]
    """`digest`, `n_genes`, and `medians_digest`, of the medians that the order came from."""
    seed: int
    split: dict[str, Any]
    """`by`, `val_frac`, `test_frac`."""
    obs_columns: list[str]
    left_out: dict[str, int]
    """By dataset, cells in which no gene of the vocabulary is detected."""
    splits: dict[str, SplitEntry]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The manifest in a file. Raises DataError when it is missing, malformed, edited or of another format."""
        path = Path(path)
        tree = read_json(path)
        try:
            found = tree["format"]
            if found != FORMAT:
                raise DataError(f"{path}: manifest of format {found!r}, this version reads {FORMAT}; {REMEDY}")
            splits = {
                name: SplitEntry(s["n_obs"], s["nnz"], tuple(ShardEntry(**shard) for shard in s["shards"]))
                for name, s in tree["splits"].items()
            }
            fields = ("fingerprint", "vocabulary", "seed", "split", "obs_columns", "left_out")
            manifest = cls(path=path, splits=splits, **{name: tree[name] for name in fields})
            expected = manifest.expected_fingerprint()
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a shard manifest ({type(error).__name__}: {error}); {REMEDY}") from None
        if manifest.fingerprint != expected:
            raise DataError(
                f"{path}: its fingerprint is {manifest.fingerprint[:12]}, its entries give {expected[:12]}: "
                f"it was edited or damaged; {REMEDY}"
            )
        return manifest

    def write(self) -> None:
        """Writes the file, atomically."""
        tree = {"format": FORMAT} | asdict(self)
        del tree["path"]
        write_json(self.path, tree)

    def expected_fingerprint(self) -> str:
        """The fingerprint that the other fields give."""
        splits = {
            name: [[shard.n_obs, shard.nnz, shard.content] for shard in split.shards]
            for name, split in self.splits.items()
        }
        what = {"format": FORMAT, "vocabulary": self.vocabulary, "seed": self.seed, "split": self.split}
        return digest(what | {"splits": splits})

    def entry(self, split: str) -> SplitEntry:
        """The split called `split`. Raises DataError when the manifest has none, or it has no cells."""
        if split not in self.splits or not self.splits[split].n_obs:
            have = ", ".join(name for name in SPLITS if name in self.splits and self.splits[name].n_obs)
            raise DataError(f"{self.path}: no cells in the {split} split (there is: {have}); raise shard.{split}_frac")
        return self.splits[split]

    def shard_path(self, shard: ShardEntry) -> Path:
        return self.path.parent / shard.name


def verify(manifest: Manifest, splits: Iterable[str] = SPLITS, threads: int = 4) -> None:
    """Hashes every byte of the shards of `splits`. Raises DataError naming the first whose sha256 is not as recorded.

    About 1 GB/s a thread where the processor has SHA instructions: for the start of training, not for every open.
    """
    shards = [shard for split in splits if split in manifest.splits for shard in manifest.splits[split].shards]
    paths = [manifest.shard_path(shard) for shard in shards]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such shard, the manifest lists it; {REMEDY}")
    with ThreadPoolExecutor(threads) as pool:
        for path, shard, found in zip(paths, shards, pool.map(sha256_file, paths)):
            if found != shard.sha256:
                raise DataError(
                    f"{path}: sha256 is {found[:12]}, the manifest has {shard.sha256[:12]}: "
                    f"the shard is damaged or was changed; {REMEDY}"
                )
