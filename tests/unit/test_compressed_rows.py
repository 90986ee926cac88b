"""Cells that preprocess compresses: smaller, opened by any reader, and sharded to the same bytes."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_corpus import genes_named, random_counts, vocabulary_of

from cellmill.config.corpus import Preprocess, Shard
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.h5 import count_dtype, write_cells
from cellmill.data.prepare.preprocess import preprocess_cells
from cellmill.data.shards.writer import write_shards
from cellmill.errors import DataError

IDS = genes_named(60)


def preprocessed(folder: Path, counts: sp.csr_matrix, compression: str | None) -> Path:
    """Cells of `counts`, preprocessed."""
    raw, out = folder / "raw.h5ad", folder / str(compression) / "cells" / "one.h5ad"
    obs = pd.DataFrame(index=[f"cell{i}" for i in range(counts.shape[0])])
    write_cells(raw, obs, pd.DataFrame(index=IDS), [counts], counts.nnz, count_dtype(int(counts.data.max())))
    options = Preprocess(organism=None, min_genes=0, max_mito_frac=1, row_block=37, compression=compression)
    with open_counts(raw) as reader:
        preprocess_cells(reader, options, out)
    return out


@pytest.mark.parametrize("largest", [30, 70_000])  # counts of 16 and of 32 bits
def test_compressed_cells_are_smaller_and_give_the_same_shards(tmp_path: Path, largest: int) -> None:
    counts = random_counts(1100, 60, largest=largest)
    shards, sizes = {}, {}
    for compression in ("gzip", None):
        cells = preprocessed(tmp_path, counts, compression)
        read = ad.read_h5ad(cells)
        assert (counts != read.X).nnz == 0
        assert read[:, IDS[3]].X.nnz == (counts[:, 3] > 0).sum()  # crashes with narrower indices
        with h5py.File(cells) as file:
            sizes[compression] = sum(file[f"X/{name}"].id.get_storage_size() for name in ("data", "indices"))
            assert file["X/data"].chunks == ((4096,) if compression else None)
        out = tmp_path / str(compression) / "shards" / "manifest.json"
        write_shards([cells], vocabulary_of(IDS), Shard(cells_per_shard=100, val_frac=0.2), out)
        shards[compression] = {path.name: path.read_bytes() for path in out.parent.glob("*.h5ad")}
    assert shards["gzip"] == shards[None]
    assert len(shards[None]) > 5
    if largest == 30:
        assert sizes["gzip"] < 0.4 * sizes[None]


@pytest.mark.parametrize("damage", ["bytes", "length"])
def test_a_damaged_chunk_is_one_line(tmp_path: Path, damage: str) -> None:
    cells = preprocessed(tmp_path, random_counts(400, 60), "gzip")
    with h5py.File(cells) as file:
        chunk = file["X/indices"].id.get_chunk_info(1)
    content = bytearray(cells.read_bytes())
    end = chunk.byte_offset + chunk.size
    if damage == "bytes":
        content[chunk.byte_offset : end] = np.random.default_rng(0).bytes(chunk.size)
    else:
        del content[end - 4 :]
    cells.write_bytes(content)
    with pytest.raises(DataError) as error:
        write_shards([cells], vocabulary_of(IDS), Shard(), tmp_path / "shards" / "manifest.json")
    assert str(error.value).startswith(f"{cells}: ")
    assert "\n" not in str(error.value)
