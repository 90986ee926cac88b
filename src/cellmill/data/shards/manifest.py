"""The manifest of a corpus's shards: their contents, and digests to check them by.

It is written last in a folder of shards: its existence means they are complete. It needs no HDF5,
so a launcher can check a corpus in little memory. Its entries are checked against each other when
it is read, and not again. The bytes of the files are checked by `verify`. verified.json lists the
files whose bytes have been hashed, with the size and time that each had before.
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
TRAINING_SPLITS = ("train", "val")
VERIFIED = "verified.json"
_HASH_THREADS = 4

Count = Annotated[int, Field(ge=0, lt=2**40)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Stamps = dict[str, list[int] | None]  # `stamp` by file name
IndexKind = Literal["offsets", "borders", "hashes", "levels", "numbers"]


def index_name(split: str, kind: IndexKind) -> str:
    """Name of the file that has values of `kind` for the cells of a split."""
    return f"{split}-{kind}.npy"


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ShardEntry(_Entry):
    """A shard: an .h5ad file with some cells of a split."""

    name: FileName
    n_obs: Count
    nnz: Count
    dtype: Literal["uint16", "uint32"]  # dtype of the counts: uint32 if one needs it
    sha256: Digest  # digest of the file's bytes
    # digest of cell names, genes and counts, which does not depend on the library that wrote the file
    content: Digest
    bytes_at: Count  # offset of the packed bytes in the file
    n_bytes: Count


class IndexEntry(_Entry):
    """A file of the index (`index.py`), with values of each cell of a split."""

    name: FileName
    sha256: Digest


class SplitEntry(_Entry):
    """The shards and the index of a split."""

    n_obs: Count
    nnz: Count
    shards: list[ShardEntry]
    index: dict[IndexKind, IndexEntry]  # every kind, if there are cells


class ShardVocabulary(TypedDict):
    """The vocabulary whose rows are the genes of the shards."""

    digest: Digest
    n_genes: Annotated[int, Field(ge=1, lt=2**31)]
    medians_digest: Digest  # digest of the medians used for the rank order
    variability: NotRequired[list[int]]


class ObsLevels(TypedDict):
    """Levels of an obs column, in the order of their codes."""

    levels: list[str]
    digest: Digest  # digest of the level of every cell


class CorpusSummary(_Entry):
    """Facts about the cells that a plan finds, and the manifest of their shards repeats."""

    left_out: dict[str, Count]  # by dataset, number of cells without any gene of the vocabulary
    obs_levels: dict[str, ObsLevels]  # by obs column with levels
    obs_numbers: dict[str, Digest]  # by obs column with numbers: digest of every cell's number
    ordered: bool  # the order of a row is data: rows are sequences, or ranked genes
    # by dataset, cells equal to an earlier one, kept or dropped (`shard.duplicates`)
    duplicates: dict[str, Count]
    ranked: bool  # rows are genes in rank order, without counts; then `ordered` as well
    across_splits: Count  # number of cells of which another split has an equal one
    counts_rules: dict[str, CountsRule] = {}  # by dataset, how its estimated counts were rounded


class Manifest(CorpusSummary):
    """Contents of manifest.json; the shards and the index are in its folder."""

    model_config = ConfigDict(populate_by_name=True)

    path: Annotated[Path, Field(exclude=True)]
    fingerprint: Digest  # covers cells, order, split and vocabulary, not paths or library versions
    vocabulary: ShardVocabulary
    seed: int
    split: dict[str, Any]  # `by`, `val_frac`, `test_frac`
    obs_columns: list[str]
    gene_order: Annotated[GeneOrder, Field(alias="order")]  # `order` in the file
    splits: dict[str, SplitEntry]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
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
        expected = fingerprint_of(self.vocabulary, self.seed, self.split, self.splits)
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
        return self.ordered and not self.ranked

    @property
    def variability(self) -> np.ndarray | None:
        """`Vocabulary.variability` of the shards' vocabulary."""
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
            # the fingerprint does not cover names, offsets and levels
            if tree.pop("checksum") != digest(tree):
                raise ValueError("its checksum is not of its entries: edited or damaged")
            return manifest
        except ValidationError as error:
            reason = error_line(*explain(error, cls))[:200]
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            reason = in_one_line(error)
        raise DataError(f"{path}: not a shard manifest ({reason}); {REMEDY}")

    def write(self) -> None:
        """Write the file, atomically."""
        tree = {"format": FORMAT} | self.model_dump(by_alias=True)
        if not self.counts_rules:
            del tree["counts_rules"]  # as in earlier versions
        write_json(self.path, tree | {"checksum": digest(tree)})

    def levels(self, columns: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return the levels of obs columns, by column.

        `columns` maps each column to the option that names it, for messages. Raises DataError for a
        column that is missing or has no levels.
        """
        lacks = "has no levels: it is of numbers with decimals, or of too many values"
        self._require(columns, self.obs_levels, lacks)
        return {name: tuple(self.obs_levels[name]["levels"]) for name in columns}

    def _require(self, columns: Mapping[str, str], known: Collection[str], lacks: str) -> None:
        for name, option in columns.items():
            if name not in self.obs_columns:
                hint = did_you_mean(name, self.obs_columns)
                raise DataError(f"{self.path}: no obs column {name!r} ({option}); {hint}")
            if name not in known:
                choices = ", ".join(known)
                raise DataError(
                    f"{self.path}: obs column {name!r} ({option}) {lacks}; choose one of: {choices}"
                )

    def fingerprint_with(
        self, levels: Iterable[str], numbers: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Compute the fingerprint of the cells with the levels and numbers of some obs columns.

        `levels` are columns, and `numbers` maps columns to the option that names each. Without columns
        it is the fingerprint of the shards. Raises DataError for a column without numbers.
        """
        self._require(numbers, self.obs_numbers, "is text")
        contents: dict[str, Any] = {"shards": self.fingerprint}
        obs_levels = {name: self.obs_levels[name] for name in levels}
        if obs_levels:
            contents["obs_levels"] = obs_levels
        if numbers:
            contents["obs_numbers"] = {name: self.obs_numbers[name] for name in numbers}
        return digest(contents) if len(contents) > 1 else self.fingerprint

    def entry(self, split: str) -> SplitEntry:
        """Return the entry of `split`. Raises DataError if it has no cells."""
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
        """List every file of the splits."""
        files: list[ShardEntry | IndexEntry] = []
        for split in splits:
            files += [*self.splits[split].shards, *self.splits[split].index.values()]
        return files


def _check_split(name: str, split: SplitEntry) -> None:
    """Raise ValueError unless totals and names of files agree."""
    for field in ("n_obs", "nnz"):
        total = getattr(split, field)
        parts = sum(getattr(shard, field) for shard in split.shards)
        if total != parts:
            raise ValueError(f"splits.{name}.{field}: {total:,}, but its shards have {parts:,}")
    index = {kind: index_name(name, kind) for kind in get_args(IndexKind)} if split.n_obs else {}
    if {kind: file.name for kind, file in split.index.items()} != index:
        names = ", ".join(index.values()) or "of no cells"
        raise ValueError(f"splits.{name}.index: expected the files {names}")


def fingerprint_of(
    vocabulary: ShardVocabulary, seed: int, split: dict[str, Any], splits: Mapping[str, SplitEntry]
) -> str:
    """Compute the fingerprint of shards.

    Its format number changes if the same entries come to mean other cells.
    """
    contents = {}
    for name, entry in splits.items():
        contents[name] = [[shard.n_obs, shard.nnz, shard.content] for shard in entry.shards]
    return digest(
        {"format": 1, "vocabulary": vocabulary, "seed": seed, "split": split, "splits": contents}
    )


def verify(manifest: Manifest, files: Sequence[ShardEntry | IndexEntry] | None = None) -> None:
    """Hash every byte of `files`, by default of all files. Raise DataError naming the first damaged one.

    This takes a second per GB and thread on a processor with SHA instructions. So it is for the start
    of training, not for every opening.
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
    """Stamp the files of the training splits, by name, for `verify_changed` and `record_verified`."""
    return {file.name: stamp(manifest.shard_path(file)) for file in manifest.files(TRAINING_SPLITS)}


def verify_changed(manifest: Manifest, stamps: Stamps, part: slice = slice(None)) -> int:
    """Hash the files of the training splits that have changed, and return their number.

    `stamps` are their stamps now. A file with the same stamp in verified.json has not changed. `part`
    selects some of the files. Raises DataError naming a damaged file.
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

    `stamps` were taken before hashing, so that a file replaced meanwhile is hashed again.
    """
    files = _read_verified(manifest) | stamps
    verified = {"fingerprint": manifest.fingerprint, "files": files}
    with suppress(OSError):  # a corpus that others cannot write to is hashed at each start
        write_json(manifest.path.with_name(VERIFIED), verified)


def _read_verified(manifest: Manifest) -> Stamps:
    """Return the stamps in verified.json, empty for none of these shards."""
    with suppress(DataError, OSError, KeyError, TypeError, ValueError):
        tree = read_json(manifest.path.with_name(VERIFIED))
        if tree["fingerprint"] == manifest.fingerprint:
            return dict(tree["files"])
    return {}


def stamp(path: Path) -> list[int] | None:
    """Return the stamp of a file, its size and modification time; None if it is missing.

    A file's bytes are not hashed again while its stamp stays the same.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
