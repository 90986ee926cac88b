"""The manifest of a corpus's shards: their contents, and digests to check them by.

Written last in a folder of shards: its existence means they are complete. Needs no HDF5, so a launcher can check a
corpus in little memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from cellmill.config.corpus import SPLITS
from cellmill.data.manifest_check import check_manifest
from cellmill.errors import DataError, did_you_mean
from cellmill.files import digest, read_json, sha256_file, write_json
from cellmill.registry import in_one_line

FORMAT = 1
REMEDY = "make the shards again (the `shard` stage)"
_ADDED = ("obs_levels", "ordered", "duplicates", "across_splits", "ranked")  # since 0.1.0


@dataclass(frozen=True)
class ShardEntry:
    name: str
    n_obs: int
    nnz: int
    dtype: str  # dtype of the counts: uint16, or uint32 if a count needs it
    sha256: str  # of the file's bytes
    content: str  # SHA-256 of cell names, genes and counts: independent of the library that wrote the file
    genes_at: int | None = None  # offset of X/indices in bytes; None in shards of 0.1.0
    counts_at: int | None = None  # offset of X/data


@dataclass(frozen=True)
class IndexEntry:
    """A file beside the shards with a number for each cell of a split."""

    name: str
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    n_obs: int
    nnz: int
    shards: tuple[ShardEntry, ...]
    index: dict[str, IndexEntry] = field(default_factory=dict)  # `offsets`, `hashes`, `levels`; none in 0.1.0

    @property
    def files(self) -> tuple[ShardEntry | IndexEntry, ...]:
        """Every file of the split."""
        return (*self.shards, *self.index.values())


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json; the shards are beside it."""

    path: Path
    fingerprint: str  # digest of cells, order, split and vocabulary; not of paths or library versions
    vocabulary: dict[str, Any]
    """`digest`, `n_genes`, and `medians_digest`, of the medians used for the rank order; `variability` if kept."""
    seed: int
    split: dict[str, Any]  # `by`, `val_frac`, `test_frac`
    obs_columns: list[str]
    left_out: dict[str, int]  # by dataset, number of cells without any gene of the vocabulary
    splits: dict[str, SplitEntry]
    obs_levels: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By obs column: `levels`, and `digest` of the level of every cell; columns of other numbers are absent."""
    ordered: bool = False  # rows are sequences
    duplicates: dict[str, int] = field(default_factory=dict)
    """By dataset, number of cells equal to an earlier one of the corpus, kept or dropped (`shard.duplicates`)."""
    ranked: bool = False  # rows are genes in rank order, without counts; `ordered` as well
    across_splits: int = 0  # number of cells of which another split has an equal one

    @property
    def n_genes(self) -> int:
        return int(self.vocabulary["n_genes"])

    @property
    def variability(self) -> np.ndarray | None:
        """`Vocabulary.variability` of the shards' vocabulary."""
        places = self.vocabulary.get("variability")
        return None if places is None else np.array(places, np.int32)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest. Raises DataError when it is missing, malformed, edited or of another format."""
        path = Path(path)
        tree = read_json(path)
        try:
            if tree["format"] != FORMAT:
                raise DataError(f"{path}: expected manifest format {FORMAT}, got {repr(tree['format'])[:80]}; {REMEDY}")
            check_manifest(tree)
            splits = {name: _split_entry(split) for name, split in tree["splits"].items()}
            fields = ("fingerprint", "vocabulary", "seed", "split", "obs_columns", "left_out")
            added = {name: tree[name] for name in _ADDED if name in tree}
            given = {name: tree[name] for name in fields} | added
            manifest = cls(path=path, splits=splits, **given)
            expected = manifest.expected_fingerprint()
            edited = "checksum" in tree and tree.pop("checksum") != digest(tree)  # none in 0.1.0
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a shard manifest ({in_one_line(error)}); {REMEDY}") from None
        if manifest.fingerprint != expected:
            raise DataError(
                f"{path}: expected fingerprint {expected[:12]} from its entries, got {manifest.fingerprint[:12]}: "
                f"edited or damaged; {REMEDY}"
            )
        if edited:  # the fingerprint does not cover names, offsets and levels
            raise DataError(f"{path}: its checksum is not of its entries: edited or damaged; {REMEDY}")
        return manifest

    def write(self) -> None:
        """Write the file, atomically."""
        tree = {"format": FORMAT} | asdict(self)
        del tree["path"]
        write_json(self.path, tree | {"checksum": digest(tree)})

    def expected_fingerprint(self) -> str:
        """Fingerprint computed from the other fields."""
        splits = {
            name: [[shard.n_obs, shard.nnz, shard.content] for shard in split.shards]
            for name, split in self.splits.items()
        }
        fields = {"format": FORMAT, "vocabulary": self.vocabulary, "seed": self.seed, "split": self.split}
        return digest(fields | {"splits": splits})

    def levels(self, columns: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Levels of obs columns by name, in the order of `columns`: names, and the option that asks for each.

        Raises DataError for a column that is not there or has no levels.
        """
        for name, option in columns.items():
            if name not in self.obs_columns:
                hint = did_you_mean(name, self.obs_columns)
                raise DataError(f"{self.path}: no obs column {name!r} ({option}); {hint}")
            if name not in self.obs_levels:
                if not self.obs_levels:
                    raise DataError(f"{self.path}: of an earlier version, without levels of obs columns; {REMEDY}")
                known = ", ".join(self.obs_levels)
                raise DataError(
                    f"{self.path}: obs column {name!r} ({option}) has no levels: it is of numbers with decimals, or of "
                    f"too many values; choose one of: {known}"
                )
        return {name: tuple(self.obs_levels[name]["levels"]) for name in columns}

    def fingerprint_with(self, columns: Iterable[str], numbers: Iterable[str] = ()) -> str:
        """Fingerprint of the cells with levels of obs columns, and with numbers of others; without that of the shards.

        Numbers have no digest of their own: theirs is that of the shards' files. Raises DataError for a column of
        numbers that is not there.
        """
        read: dict[str, Any] = {name: self.obs_levels[name] for name in columns}
        if missing := [name for name in numbers if name not in self.obs_columns]:
            raise DataError(f"{self.path}: no obs column {missing[0]!r}; {did_you_mean(missing[0], self.obs_columns)}")
        tree = {"shards": self.fingerprint, "obs_levels": read} if read else {}
        if names := list(numbers):
            files = [shard.sha256 for split in self.splits.values() for shard in split.shards]
            tree |= {"shards": self.fingerprint, "obs_numbers": names, "files": files}
        return digest(tree) if tree else self.fingerprint

    def entry(self, split: str) -> SplitEntry:
        """The entry of `split`. Raises DataError when it is missing or has no cells."""
        if split not in self.splits or not self.splits[split].n_obs:
            others = ", ".join(name for name in SPLITS if name in self.splits and self.splits[name].n_obs)
            raise DataError(f"{self.path}: no cells in the {split} split, only in: {others}; raise shard.{split}_frac")
        return self.splits[split]

    def shard_path(self, shard: ShardEntry | IndexEntry) -> Path:
        return self.path.parent / shard.name


def _split_entry(tree: dict[str, Any]) -> SplitEntry:
    index = {name: IndexEntry(**entry) for name, entry in tree.get("index", {}).items()}
    return SplitEntry(tree["n_obs"], tree["nnz"], tuple(ShardEntry(**shard) for shard in tree["shards"]), index)


def verify(manifest: Manifest, files: Sequence[ShardEntry | IndexEntry] | None = None, threads: int = 4) -> None:
    """Hash every byte of the files, of all unless given. Raises DataError naming the first with another SHA-256.

    About 1 GB/s per thread on a processor with SHA instructions: for the start of training, not for every open.
    """
    if files is None:
        files = [file for split in manifest.splits.values() for file in split.files]
    paths = [manifest.shard_path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file, but the manifest lists it; {REMEDY}")
    with ThreadPoolExecutor(threads) as pool:
        for path, file, sha256 in zip(paths, files, pool.map(sha256_file, paths)):
            if sha256 != file.sha256:
                raise DataError(
                    f"{path}: expected sha256 {file.sha256[:12]} as in the manifest, got {sha256[:12]}: "
                    f"damaged or changed; {REMEDY}"
                )
