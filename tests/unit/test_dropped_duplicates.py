"""Of equal cells of several datasets the one that is listed first is kept."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import pytest
from small_corpus import genes_named, random_counts, vocabulary_of, write_dataset

from cellmill.config.corpus import Shard
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards


@pytest.mark.parametrize("listed", ["ab", "ba"])
def test_the_cells_of_the_dataset_that_is_listed_first_are_kept(tmp_path: Path, listed: str) -> None:
    genes, counts = genes_named(20), random_counts(30, 20)
    paths = {name: write_dataset(tmp_path / "cells" / f"{name}.h5ad", counts, genes) for name in "ab"}

    def write(duplicates: str) -> Manifest:
        options = Shard(val_frac=0, test_frac=0, cells_per_shard=100, duplicates=duplicates)  # type: ignore[arg-type]
        out = tmp_path / duplicates / "manifest.json"
        return write_shards([paths[name] for name in listed], vocabulary_of(genes), options, out)

    dropped = write("drop")
    [shard] = dropped.splits["train"].shards
    assert {name[0] for name in ad.read_h5ad(dropped.shard_path(shard)).obs_names} == {listed[0]}
    assert dropped.duplicates == {listed[1]: 30}
    assert write("keep").duplicates == {"b": 30}
