"""A corpus of a few hundred random cells on disk, for the tests of shards and stream."""

import dataclasses
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.cli import main
from cellmill.config import load_config
from cellmill.config.corpus import Shard
from cellmill.config.datasets import ObsColumns
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Stream
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.h5 import count_dtype
from cellmill.data.inputs.packed_cells import write_packed
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.data.stream.batch_maker import BatchFields
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import DataRank, OrderOptions


def random_counts(n_obs: int, n_vars: int, seed: int = 0, largest: int = 30) -> sp.csr_matrix:
    """Counts with 1 to `n_vars // 2` genes a cell, all cells different."""
    rng = np.random.default_rng(seed)
    dense = np.zeros((n_obs, n_vars), np.uint32)
    for row in dense:
        genes = rng.choice(n_vars, rng.integers(1, n_vars // 2 + 1), replace=False)
        row[genes] = rng.integers(1, largest + 1, len(genes))
    return sp.csr_matrix(dense)


def write_dataset(
    path: Path, counts: sp.csr_matrix, gene_ids: list[str], obs: dict[str, object] | None = None
) -> Path:
    """A preprocessed .h5ad."""
    names = [f"cell{i}" for i in range(counts.shape[0])]
    var = pd.DataFrame({"symbol": gene_ids}, index=gene_ids)
    largest = int(counts.data.max(initial=0))
    frame = pd.DataFrame(obs or {}, index=names)
    counts.sort_indices()
    write_packed(path, frame, var, [counts], "genes", count_dtype(largest))
    return path


def prepare_by_commands(config: Path, folder: Path) -> tuple[list[Path], Path]:
    """Preprocessed cells of each dataset of corpus `c`, and the manifest of their shards, by the
    commands.
    """
    cells = list[Path]()
    genes = folder / "v.tsv"
    manifest = folder / "shards" / "manifest.json"
    for name, row in load_config(config).datasets("c").items():
        columns = row.model_dump(include=set(ObsColumns.model_fields), exclude_none=True)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in columns.items()]
        cells.append(folder / "cells" / f"{name}.h5ad")
        files = [
            "--input",
            row.path,
            "--out",
            str(cells[-1]),
            "--report",
            str(cells[-1].with_suffix(".json")),
        ]
        assert main(["preprocess", "--config", str(config), "--dataset", name, *files, *flags]) == 0
    given = ["--config", str(config), "--cells", *map(str, cells)]
    assert main(["vocabulary", *given, "--out", str(genes)]) == 0
    assert main(["shard", *given, "--vocabulary", str(genes), "--out", str(manifest)]) == 0
    return cells, manifest


def genes_named(n: int) -> list[str]:
    return [f"ENSG{i:011d}" for i in range(n)]


def vocabulary_of(gene_ids: list[str], seed: int = 1) -> Vocabulary:
    medians = np.random.default_rng(seed).lognormal(0, 1, len(gene_ids)).astype(np.float32)
    return Vocabulary(
        gene_ids, [f"g{i}" for i in range(len(gene_ids))], np.ones(len(gene_ids), np.int64), medians
    )


def write_corpus(
    folder: Path,
    cells: int | sp.csr_matrix,
    n_vars: int = 40,
    seed: int = 0,
    obs: dict[str, object] | None = None,
    **options: object,
) -> Manifest:
    """Shards of one dataset, of counts or random cells, all for training unless `options` of
    `shard` say otherwise.
    """
    counts = random_counts(cells, n_vars, seed) if isinstance(cells, int) else cells
    ids = genes_named(counts.shape[1])
    path = write_dataset(folder / "cells" / "one.h5ad", counts, ids, obs)
    shard = Shard(**({"val_frac": 0, "test_frac": 0, "cells_per_shard": 100} | options))
    return write_shards([path], vocabulary_of(ids), shard, folder / "shards" / "manifest.json")


def shard_paths(manifest: Manifest, *splits: str) -> list[Path]:
    """Files of the shards of some splits, of every split if none is named."""
    paths = []
    for split in splits or manifest.splits:
        paths += [manifest.shard_path(shard) for shard in manifest.splits[split].shards]
    return paths


def read_obs(manifest: Manifest, *splits: str) -> pd.DataFrame:
    """Columns of the cells of some splits, shard after shard."""
    return pd.concat([ad.read_h5ad(path).obs for path in shard_paths(manifest, *splits)])


def stream_of(
    manifest: Manifest,
    rank: int = 0,
    world: int = 1,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> CellStream:
    """Cells of the training split in 8 small lanes; `options` are of section `stream`.

    `changes` are arguments of the stream, or fields of the classes of its arguments.
    """
    order = {"lanes": 8, "block_cells": 4, "window_blocks": 3, "io_threads": 2} | (options or {})
    given: dict[str, Any] = {
        "manifest_path": manifest.path,
        "split": "train",
        "tokens": ContinuousTokens(max_tokens=12),
        "token_budget": 400,
        "stream": Stream.model_validate(order),
        "global_batch": 32,
        "data_rank": DataRank(rank, world),
        "seed": 0,
    }
    given |= changes
    given["token_options"] = given.pop("tokens")
    kinds = {
        "source": SplitSource,
        "order_options": OrderOptions,
        "micro_batch_rule": MicroBatchRule,
        "fields": BatchFields,
    }
    for name, kind in kinds.items():
        names = [field.name for field in dataclasses.fields(kind) if field.name in given]
        given[name] = kind(**{field: given.pop(field) for field in names})
    return CellStream(**given)
