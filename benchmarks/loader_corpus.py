"""Cells that the loaders of `loader.py` read, as preprocessed cells and as shards."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

import cellmill
from cellmill.config.corpus import Shard
from cellmill.data import compiled_loops
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.packed_cells import write_packed
from cellmill.data.shards.writer import write_shards

GENES = 20_000
MEAN_NONZEROS = 2_040
SD_NONZEROS = 400
BLOCK_CELLS = 64
WINDOW_BLOCKS = 128
MAX_TOKENS = 2_048


@dataclass(frozen=True)
class Corpus:
    """What the loaders read."""

    cells: Path
    manifest: Path
    vocabulary: Vocabulary
    n_cells: int


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Wait until no other process writes a store to `folder`: loaders are started together."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_corpus(folder: Path, n_cells: int, order: Literal["rank", "genes"] = "rank") -> Corpus:
    """Simulated cells with log-normal expression, as preprocessed cells and as shards; made once
    for a folder.
    """
    ids = [f"ENSG{gene:011d}" for gene in range(GENES)]
    medians = np.random.default_rng(1).lognormal(0, 0.5, GENES).astype(np.float32)
    vocabulary = Vocabulary(ids, ids, np.full(GENES, n_cells), medians)
    corpus = Corpus(
        folder / f"cells-{n_cells}.h5ad",
        folder / f"shards-{order}-{n_cells}" / "manifest.json",
        vocabulary,
        n_cells,
    )
    if not corpus.cells.exists():
        obs = pd.DataFrame(index=[f"cell{i}" for i in range(n_cells)])
        var = pd.DataFrame({"symbol": ids}, index=ids)
        write_packed(corpus.cells, obs, var, simulate(n_cells), "genes", np.dtype("<u2"))
    if not corpus.manifest.exists():
        options = Shard(val_frac=0, test_frac=0, order=order)
        write_shards([corpus.cells], vocabulary, options, corpus.manifest)
    return corpus


def simulate(n_cells: int, block: int = 512) -> Iterator[sp.csr_matrix]:
    rng = np.random.default_rng(0)
    scale = 1 / rng.lognormal(0, 1, GENES)
    for first in range(0, n_cells, block):
        sizes = np.clip(
            rng.normal(MEAN_NONZEROS, SD_NONZEROS, min(block, n_cells - first)), 600, 4_000
        ).astype(int)
        # the genes that would come first in a race with their rates: sampling by weight without
        # replacement
        genes = [
            np.sort(np.argpartition(rng.exponential(size=GENES) * scale, size)[:size])
            for size in sizes
        ]
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        counts = rng.geometric(0.45, indptr[-1]).astype(np.uint16)
        yield sp.csr_matrix(
            (counts, np.concatenate(genes).astype(np.int32), indptr), shape=(len(sizes), GENES)
        )


def write_plain(corpus: Corpus) -> Path:
    """An .h5ad of the cells with plain CSR in X, for programs that read no packed cells; written
    once.
    """
    path = corpus.cells.with_name(f"plain-{corpus.n_cells}.h5ad")
    if not path.exists():
        part = path.with_suffix(".part")
        cellmill.open_cells(corpus.cells).write_h5ad(part)
        part.replace(path)
    return path


def shuffled_cells(corpus: Corpus) -> ad.AnnData:
    """All cells in memory in random order, as a preshuffling writer would store them."""
    cells = cellmill.open_cells(corpus.cells)
    return cells[np.random.default_rng(0).permutation(corpus.n_cells)].copy()


def compile_loops() -> None:
    """Compile what a long training compiles in the background, and wait for it."""
    if compiled_loops.load_loops() is None:
        return
    while compiled_loops.COMPILED.loops_for(compiled_loops.MIN_VALUES) is None:
        time.sleep(0.01)
