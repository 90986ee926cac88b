"""The manifest of a corpus's shards: what the shards contain, and digests to check the files by.

The manifest is written last in a folder of shards. So if there is a manifest, the shards are complete.
Reading it needs no HDF5, so a launcher can check a corpus in little memory.

The entries of the manifest are checked against each other when it is read, and not again. `verify` checks the
bytes of the files. The file verified.json lists the files whose bytes have been hashed, with the size and the
modification time that each file had before hashing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from cellmill.config.corpus import SPLITS
from cellmill.config.datasets import CountsRule
from cellmill.config.plugin import in_one_line
from cellmill.config.section import error_line, explain
from cellmill.data.genes.vocabulary import as_permutation
from cellmill.data.packing.cells import GeneOrder
from cellmill.errors import DataError, did_you_mean
from cellmill.files import digest, progress, read_json, sha256_file, write_json

FORMAT = 3
REMEDY = "make the shards again (the `shard` stage)"
TRAINING_SPLITS = ("train", "val")  # splits that a training reads
VERIFIED = "verified.json"
_HASH_THREADS = 4

Count = Annotated[int, Field(ge=0, lt=2**40)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Stamps = dict[str, list[int] | None]  # the result of `read_stamp`, by file name
# `index.py` describes each kind
IndexKind = Literal["offsets", "borders", "hashes", "levels", "numbers"]


def name_index_file(split: str, kind: IndexKind) -> str:
    """Return the name of the file with the array `kind` of the index of a split."""
    return f"{split}-{kind}.npy"


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ShardEntry(_Entry):
    """A shard: an .h5ad file with some cells of a split."""

    name: FileName
    n_obs: Count
    nnz: Count  # number of nonzeros: pairs of a cell and a gene with a count
    # type of the counts: uint32 if a count does not fit into uint16
    dtype: Literal["uint16", "uint32"]
    sha256: Digest  # digest of the file's bytes
    # digest of cell names, genes and counts. It does not depend on the library that wrote the file
    content: Digest
    bytes_at: Count  # position of the first packed byte in the file
    n_bytes: Count  # number of packed bytes


class IndexEntry(_Entry):
    """A file of the index (`index.py`). It has an array with an entry for each cell of a split."""

    name: FileName
    sha256: Digest


class SplitEntry(_Entry):
    """The shards and the index of a split."""

    n_obs: Count
    nnz: Count
    shards: list[ShardEntry]
    index: dict[IndexKind, IndexEntry]  # an entry for every kind, or none if the split has no cells


class ShardVocabulary(TypedDict):
    """The vocabulary of the shards. Their genes are rows of this vocabulary."""

    digest: Digest
    n_genes: Annotated[int, Field(ge=1, lt=2**31)]
    medians_digest: Digest  # digest of the medians by which genes are ranked
    variability: NotRequired[list[int]]  # position of each gene if genes are sorted by variability


class ObsLevels(TypedDict):
    """Levels of an obs column, in the order of their codes."""

    levels: list[str]
    digest: Digest  # digest of the level of every cell


class CorpusSummary(_Entry):
    """Facts about the cells of a corpus. A plan finds them, and the manifest repeats them."""

    left_out: dict[str, Count]  # by dataset, the number of cells without any gene of the vocabulary
    obs_levels: dict[str, ObsLevels]  # by name, the obs columns that have levels
    # by name, the obs columns that have numbers: digest of every cell's number
    obs_numbers: dict[str, Digest]
    # True if the order of the entries of a row is data: rows are sequences, or genes in rank order
    ordered: bool
    # by dataset, the number of cells that equal an earlier cell. `shard.duplicates` keeps or drops them
    duplicates: dict[str, Count]
    ranked: bool  # True if rows are genes in rank order, without counts. `ordered` is then True too
    across_splits: Count  # number of cells that equal a cell of another split
    counts_rules: dict[str, CountsRule] = {}  # by dataset, how its estimated counts were rounded


class Manifest(CorpusSummary):
    """Contents of manifest.json. The shards and the index are in the folder of this file."""

    model_config = ConfigDict(populate_by_name=True)

    path: Annotated[Path, Field(exclude=True)]
    # digest of cells, order, split and vocabulary. It does not depend on paths or versions of libraries
    fingerprint: Digest
    vocabulary: ShardVocabulary
    seed: int
    split: dict[str, Any]  # options of the split: `by`, `val_frac`, `test_frac`
    obs_columns: list[str]
    gene_order: Annotated[GeneOrder, Field(alias="order")]  # the file calls it `order`
    splits: dict[str, SplitEntry]

    @model_validator(mode="after")
    def _check_entries(self) -> Self:
        """Raise ValueError if entries of the manifest do not fit each other."""
        if self.variability is not None:
            as_permutation(self.vocabulary["variability"], self.n_genes)
        for name in SPLITS:
            if name not in self.splits:
                raise ValueError(f"splits.{name}: is missing")
        names = [shard.name for split in self.splits.values() for shard in split.shards]
        if len(set(names)) < len(names):
            raise ValueError("splits: two shards of one name")
        for field in ("obs_levels", "obs_numbers"):
            unknown = getattr(self, field).keys() - set(self.obs_columns)
            if unknown:
                raise ValueError(f"{field}.{min(unknown)[:80]}: is none of obs_columns")
        for name, split in self.splits.items():
            _check_split(name, split)
        expected = compute_fingerprint(self.vocabulary, self.seed, self.split, self.splits)
        if self.fingerprint != expected:
            raise ValueError(
                f"expected fingerprint {expected[:12]} from its entries, got {self.fingerprint[:12]}: edited or damaged"
            )
        return self

    @property
    def n_genes(self) -> int:
        return self.vocabulary["n_genes"]

    @property
    def has_sequences(self) -> bool:
        """True if the shards have sequences instead of cells."""
        return self.ordered and not self.ranked

    @property
    def variability(self) -> np.ndarray | None:
        """Position of each gene if genes are sorted by variability, `(genes,)` int32.

        Position 0 is the most variable gene. None if the vocabulary has no such order.
        """
        positions = self.vocabulary.get("variability")
        return None if positions is None else np.array(positions, np.int32)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest. Raises DataError if it is missing, malformed, edited or in another format."""
        path = Path(path)
        tree = read_json(path)
        try:
            if tree["format"] != FORMAT:
                raise DataError(
                    f"{path}: expected manifest format {FORMAT}, got {repr(tree['format'])[:80]}; {REMEDY}"
                )
            manifest = cls.model_validate({**tree, "path": path})
            # the checksum also covers what the fingerprint does not: names, positions and levels
            if tree.pop("checksum") != digest(tree):
                raise ValueError("its checksum is not of its entries: edited or damaged")
            return manifest
        except ValidationError as error:
            reason = error_line(*explain(error, cls))[:200]
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            reason = in_one_line(error)
        raise DataError(f"{path}: not a shard manifest ({reason}); {REMEDY}")

    def write(self) -> None:
        """Write manifest.json, atomically."""
        tree = {"format": FORMAT} | self.model_dump(by_alias=True)
        if not self.counts_rules:
            del tree["counts_rules"]  # earlier versions do not have this key
        write_json(self.path, tree | {"checksum": digest(tree)})

    def levels(self, columns: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return the levels of obs columns, by column.

        `columns` has the name of each column, with the option that names it. Error messages show the option.
        Raises DataError for a column that is missing or has no levels.
        """
        problem = "has no levels: it is of numbers with decimals, or of too many values"
        self._check_columns(columns, self.obs_levels, problem)
        return {name: tuple(self.obs_levels[name]["levels"]) for name in columns}

    def _check_columns(
        self, columns: Mapping[str, str], usable: Collection[str], problem: str
    ) -> None:
        """Raise DataError for a column that is missing, or that is not in `usable`.

        `problem` says what is wrong with a column that is not in `usable`.
        """
        for name, option in columns.items():
            if name not in self.obs_columns:
                hint = did_you_mean(name, self.obs_columns)
                raise DataError(f"{self.path}: no obs column {name!r} ({option}); {hint}")
            if name not in usable:
                choices = ", ".join(usable)
                raise DataError(
                    f"{self.path}: obs column {name!r} ({option}) {problem}; choose one of: {choices}"
                )

    def fingerprint_with(
        self, levels: Iterable[str], numbers: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Compute the fingerprint of the cells together with some obs columns.

        `levels` has the names of columns with levels. `numbers` has the names of columns with numbers, each
        with the option that names it. Without columns the result is the fingerprint of the shards. Raises
        DataError if a column of `numbers` is missing or has no numbers.
        """
        self._check_columns(numbers, self.obs_numbers, "is text")
        contents: dict[str, Any] = {"shards": self.fingerprint}
        obs_levels = {name: self.obs_levels[name] for name in levels}
        if obs_levels:
            contents["obs_levels"] = obs_levels
        if numbers:
            contents["obs_numbers"] = {name: self.obs_numbers[name] for name in numbers}
        return digest(contents) if len(contents) > 1 else self.fingerprint

    def entry(self, split: str) -> SplitEntry:
        """Return the entry of a split. Raises DataError if the split has no cells."""
        if not self.splits[split].n_obs:
            others = ", ".join(name for name in SPLITS if self.splits[name].n_obs)
            remedy = f"raise shard.{split}_frac"
            if split == "train":
                remedy = "lower shard.val_frac or shard.test_frac"
            raise DataError(
                f"{self.path}: no cells in the {split} split, only in: {others}; {remedy}"
            )
        return self.splits[split]

    def shard_path(self, shard: ShardEntry | IndexEntry) -> Path:
        return self.path.parent / shard.name

    def files(self, splits: Iterable[str] = SPLITS) -> list[ShardEntry | IndexEntry]:
        """List the entries of all files of the splits: shards, and arrays of the index."""
        files: list[ShardEntry | IndexEntry] = []
        for split in splits:
            files += [*self.splits[split].shards, *self.splits[split].index.values()]
        return files


def _check_split(name: str, split: SplitEntry) -> None:
    """Raise ValueError if a total is not the sum over the shards, or a file of the index has a wrong name."""
    for field in ("n_obs", "nnz"):
        total = getattr(split, field)
        sum_of_shards = sum(getattr(shard, field) for shard in split.shards)
        if total != sum_of_shards:
            raise ValueError(
                f"splits.{name}.{field}: {total:,}, but its shards have {sum_of_shards:,}"
            )
    expected = {}
    if split.n_obs:
        expected = {kind: name_index_file(name, kind) for kind in get_args(IndexKind)}
    if {kind: file.name for kind, file in split.index.items()} != expected:
        names = ", ".join(expected.values()) or "of no cells"
        raise ValueError(f"splits.{name}.index: expected the files {names}")


def compute_fingerprint(
    vocabulary: ShardVocabulary, seed: int, split: dict[str, Any], splits: Mapping[str, SplitEntry]
) -> str:
    """Compute the fingerprint of shards from entries of their manifest."""
    contents = {}
    for name, entry in splits.items():
        contents[name] = [[shard.n_obs, shard.nnz, shard.content] for shard in entry.shards]
    # the format number is to change if equal entries come to mean other cells
    return digest(
        {"format": 1, "vocabulary": vocabulary, "seed": seed, "split": split, "splits": contents}
    )


def verify(manifest: Manifest, files: Sequence[ShardEntry | IndexEntry] | None = None) -> None:
    """Hash every byte of `files`, and compare each SHA-256 with the manifest. None hashes all files.

    Raises DataError if a file is missing or damaged. The message names the first such file.

    This takes about a second per GB and thread on a processor with SHA instructions. So it is for the start of
    a training, not for every opening of the shards.
    """
    files = manifest.files() if files is None else files
    paths = [manifest.shard_path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file, but the manifest lists it; {REMEDY}")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        megabytes = [path.stat().st_size / 1e6 for path in paths]
        hashed = zip(paths, files, pool.map(sha256_file, paths), megabytes)
        for path, file, sha256, _ in progress(
            hashed, "hashing shards", sum(megabytes), "MB", lambda item: item[3]
        ):
            if sha256 != file.sha256:
                raise DataError(
                    f"{path}: expected sha256 {file.sha256[:12]} as in the manifest, got {sha256[:12]}: "
                    f"damaged or changed; {REMEDY}"
                )


def stamp_files(manifest: Manifest) -> Stamps:
    """Read the stamps of the files of the training splits, by name.

    `verify_changed` and `record_verified` need these stamps.
    """
    files = manifest.files(TRAINING_SPLITS)
    return {file.name: read_stamp(manifest.shard_path(file)) for file in files}


def verify_changed(manifest: Manifest, stamps: Stamps, part: slice = slice(None)) -> int:
    """Hash the files of the training splits that have changed. Returns the number of these files.

    `stamps` has the present stamps of the files. If verified.json has the same stamp for a file, the file has
    not changed. `part` selects some of the files. Raises DataError if a file is missing or damaged. The
    message names the file.
    """
    verified = _read_verified(manifest)
    changed = []
    for file in manifest.files(TRAINING_SPLITS)[part]:
        if verified.get(file.name, "") != stamps[file.name]:
            changed.append(file)
    verify(manifest, changed)
    return len(changed)


def record_verified(manifest: Manifest, stamps: Stamps) -> None:
    """Record in verified.json that the files of `stamps` have been hashed.

    `stamps` must have been read before hashing. So a file that was replaced while it was hashed is hashed again
    at the next start.
    """
    files = _read_verified(manifest) | stamps
    verified = {"fingerprint": manifest.fingerprint, "files": files}
    # a corpus in a folder that this user cannot write to is hashed at each start
    with suppress(OSError):
        write_json(manifest.path.with_name(VERIFIED), verified)


def _read_verified(manifest: Manifest) -> Stamps:
    """Return the stamps in verified.json. Without a readable file for these shards there are none."""
    with suppress(DataError, OSError, KeyError, TypeError, ValueError):
        tree = read_json(manifest.path.with_name(VERIFIED))
        if tree["fingerprint"] == manifest.fingerprint:
            return dict(tree["files"])
    return {}


def read_stamp(path: Path) -> list[int] | None:
    """Return the size and the modification time of a file in nanoseconds; None if the file is missing.

    As long as this stamp of a file stays the same, the bytes of the file are not hashed again.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
