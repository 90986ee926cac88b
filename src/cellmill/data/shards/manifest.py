"""The manifest of a corpus's shards: their contents, and digests to check them by.

It is written last in a folder of shards: its existence means they are complete. It needs no HDF5, so a launcher can
check a corpus in little memory. Types and ranges of manifest.json are checked before it is used: the fingerprint covers
cells and order, but not the names of the files, which must not lead out of their folder. verified.json lists the files
whose bytes have been hashed, with the size and time that each had then.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cellmill.config.corpus import SPLITS
from cellmill.config.plugin import in_one_line
from cellmill.config.section import error_line, explain
from cellmill.data.genes.vocabulary import as_places
from cellmill.errors import DataError, did_you_mean
from cellmill.files import digest, read_json, sha256_file, write_json

Count = Annotated[int, Field(ge=0, lt=2**40)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Kind = Literal["offsets", "hashes", "levels"]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Shard(_Part):
    name: FileName
    n_obs: Count
    nnz: Count
    dtype: Literal["uint16", "uint32"]
    sha256: Digest
    content: Digest
    genes_at: Count | None = None
    counts_at: Count | None = None


class _Index(_Part):
    name: FileName
    sha256: Digest


class _Split(_Part):
    n_obs: Count
    nnz: Count
    shards: list[_Shard]
    index: dict[Kind, _Index] = {}


class _Vocabulary(_Part):
    digest: Digest
    n_genes: Annotated[int, Field(ge=1, lt=2**31)]
    variability: list[int] | None = None


class _Levels(_Part):
    levels: list[str]
    digest: Digest


class _Manifest(_Part):
    fingerprint: Digest
    vocabulary: _Vocabulary
    seed: int
    split: dict[str, Any]
    obs_columns: list[str]
    left_out: dict[str, Count]
    splits: dict[str, _Split]
    obs_levels: dict[str, _Levels] = {}
    ordered: bool = False
    ranked: bool = False
    duplicates: dict[str, Count] = {}
    across_splits: Count = 0
    checksum: Digest | None = None


def check_manifest(tree: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for a value of another type or range, or entries that contradict each other."""
    try:
        checked = _Manifest.model_validate(tree)
    except ValidationError as error:
        raise ValueError(error_line(*explain(error, _Manifest))[:200]) from None
    if checked.vocabulary.variability is not None:
        as_places(checked.vocabulary.variability, checked.vocabulary.n_genes)
    splits = checked.splits
    if missing := [name for name in SPLITS if name not in splits]:
        raise ValueError(f"splits.{missing[0]}: is missing")
    names = [shard.name for split in splits.values() for shard in split.shards]
    if len(set(names)) < len(names):
        raise ValueError("splits: two shards of one name")
    if unknown := checked.obs_levels.keys() - set(checked.obs_columns):
        raise ValueError(f"obs_levels.{min(unknown)[:80]}: is none of obs_columns")
    for name, split in splits.items():
        for key, total in (("n_obs", split.n_obs), ("nnz", split.nnz)):
            if total != (parts := sum(getattr(shard, key) for shard in split.shards)):
                raise ValueError(f"splits.{name}.{key}: {total:,}, but its shards have {parts:,}")
        for kind, file in split.index.items():
            if file.name != (expected := f"{name}-{kind}.npy"):
                raise ValueError(f"splits.{name}.index.{kind}.name: expected {expected}")
        if "offsets" in split.index and any(None in (shard.genes_at, shard.counts_at) for shard in split.shards):
            raise ValueError(f"splits.{name}: a shard without genes_at or counts_at, which index.offsets needs")


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
