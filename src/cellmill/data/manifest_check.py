"""Types and ranges of manifest.json, checked before anything is made of them.

The fingerprint covers cells and order, but not the names of the files, which must not lead out of their folder. Keys
that are not listed here are left to `Manifest`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cellmill.config.corpus import SPLITS
from cellmill.config.section import error_line, explain
from cellmill.data.vocabulary import as_places

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
