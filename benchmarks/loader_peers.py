"""Other loaders over the cells of `loader.py`, each in the form and with the settings that its
documentation gives.

A function `peer(corpus, batch)` gives epochs, each an iterator of the number of cells of its
batches. Stores are written when a peer is first opened.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
from loader_corpus import BLOCK_CELLS, MAX_TOKENS, WINDOW_BLOCKS, Corpus, shuffled_cells

from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.data.arrays import counts_per_10k, inverse_medians, rank_order_rows

Epochs = Iterator[Iterator[int]]
RAW = "genes and counts"
RANK = "rank tokens"
CONTINUOUS = "continuous tokens"


def annbatch(
    corpus: Corpus, batch: int, gives: str, in_rank_order: bool, our_tokenizer: bool = False
) -> Epochs:
    """Chunks of 64 cells, 128 at a time, from a sharded zarr store read by zarrs: its fastest
    setting here.

    Continuous tokens are made by numpy, or by `our_tokenizer`, so that only the loaders differ.
    """
    package = importlib.import_module("annbatch")
    zarr = importlib.import_module("zarr")
    if importlib.util.find_spec("zarrs"):
        importlib.import_module("zarrs")
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    weights = inverse_medians(corpus.vocabulary.medians)
    store = corpus.cells.parent / f"annbatch-{'ranked' if in_rank_order else 'plain'}.zarr"
    if not (store / "zarr.json").exists():
        cells = shuffled_cells(corpus)
        if in_rank_order:
            rows = cells.X
            starts = rows.indptr.astype(np.int64)
            genes, counts = rank_order_rows(starts, rows.indices, rows.data, weights)
            cells.X = sp.csr_matrix((counts, genes, rows.indptr), shape=rows.shape)
        group = zarr.open_group(store, mode="w", zarr_format=3)
        package.write_sharded(group, cells, n_obs_per_chunk=BLOCK_CELLS, compressors=())
    make = {
        RAW: n_rows,
        RANK: prefixes if in_rank_order else lambda rows: ranked(rows, weights),
        CONTINUOUS: tokenized() if our_tokenizer else continuous,
    }
    matrix = ad.io.sparse_dataset(zarr.open_group(store, mode="r")["X"])
    while True:
        sizes = {"chunk_size": BLOCK_CELLS, "preload_nchunks": WINDOW_BLOCKS, "batch_size": batch}
        loader = package.Loader(shuffle=True, preload_to_gpu=False, **sizes).add_dataset(matrix)
        yield (make[gives](made["X"]) for made in loader)


def scdataset(corpus: Corpus, batch: int, gives: str) -> Epochs:
    """Blocks of 64 cells, 64 batches fetched at a time, from contiguous CSR in an .h5ad."""
    package = importlib.import_module("scdataset")
    cells = ad.read_h5ad(corpus.cells, backed="r")
    strategy = package.BlockShuffling(block_size=BLOCK_CELLS)
    loader = package.scDataset(
        cells,
        strategy,
        batch,
        fetch_factor=64,
        fetch_callback=lambda backed, rows: backed.X[rows],
        seed=0,
    )
    weights = inverse_medians(corpus.vocabulary.medians)
    make = {RAW: n_rows, RANK: lambda rows: ranked(rows, weights)}
    while True:
        yield map(make[gives], loader)


def scdl(corpus: Corpus, batch: int, gives: str) -> Epochs:
    """Single rows of a memory map at random, put together to batches."""
    package = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    store = corpus.cells.parent / "scdl"
    given: dict[str, Any] = (
        {} if store.exists() else {"h5ad_path": str(corpus.cells), "use_X_not_raw": True}
    )
    dataset = package.SingleCellMemMapDataset(str(store), **given)

    def epoch(seed: int) -> Iterator[int]:
        order = np.random.default_rng(seed).permutation(corpus.n_cells)
        for first in range(0, len(order), batch):
            rows = [dataset.get_row(int(cell))[0] for cell in order[first : first + batch]]
            counts = np.concatenate([values for values, _ in rows])
            genes = np.concatenate([genes for _, genes in rows])
            if gives == CONTINUOUS:
                starts = np.cumsum([0, *(len(values) for values, _ in rows)])
                continuous(
                    sp.csr_matrix(
                        (counts, genes, starts), shape=(len(rows), corpus.vocabulary.n_genes)
                    )
                )
            yield len(rows)

    seed = 0
    while True:
        yield epoch(seed)
        seed += 1


def annloader(corpus: Corpus, batch: int) -> Epochs:
    """AnnLoader over cells in memory; 16 batches of an epoch, since a whole one takes minutes."""
    module = importlib.import_module("anndata.experimental")
    loader = module.AnnLoader(ad.read_h5ad(corpus.cells), batch_size=batch, shuffle=True)
    while True:
        yield islice((made.X.shape[0] for made in loader), 16)


def n_rows(matrix: Any) -> int:
    return int(matrix.shape[0])


def ranked(matrix: sp.csr_matrix, weights: np.ndarray) -> int:
    """Rank tokens made of a batch by the function that orders our shards, cut as ours are."""
    indptr = matrix.indptr.astype(np.int64)
    genes, _ = rank_order_rows(indptr, matrix.indices, matrix.data, weights)
    return tokens(genes, indptr)


def prefixes(matrix: sp.csr_matrix) -> int:
    """Rank tokens of rows that are stored in rank order."""
    return tokens(matrix.indices, matrix.indptr)


def continuous(matrix: sp.csr_matrix) -> int:
    """Continuous tokens of a batch, genes in the order of the rows."""
    values = np.log1p(counts_per_10k(matrix.data, matrix.indptr.astype(np.int64), np.float32))
    packed(values, matrix.indptr)
    return tokens(matrix.indices, matrix.indptr)


def tokenized() -> Callable[[sp.csr_matrix], int]:
    """Make continuous tokens of a batch by the tokenizer of our stream."""
    options = ContinuousTokens(max_tokens=MAX_TOKENS)
    tokenizer = options.load()(options)

    def make(matrix: sp.csr_matrix) -> int:
        _, _, ends = tokenizer.tokenize(matrix.indices, matrix.data, matrix.indptr.astype(np.int64))
        return len(ends) - 1

    return make


def tokens(genes: np.ndarray, indptr: np.ndarray) -> int:
    cut = packed(genes, indptr)
    np.add(cut, 2, out=cut)
    return len(indptr) - 1


def packed(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """The first `MAX_TOKENS` of each row, one row after another."""
    kept = np.minimum(np.diff(indptr), MAX_TOKENS)
    return np.concatenate([values[a : a + n] for a, n in zip(indptr.tolist(), kept.tolist())])


PEERS: dict[tuple[str, str, str], Callable[[Corpus, int], Epochs]] = {
    (package, what, gives): (
        lambda corpus, batch, gives=gives, order=order: annbatch(corpus, batch, gives, order)
    )
    for package, what, order, gives in (
        ("annbatch", "plain rows", False, CONTINUOUS),
        ("annbatch", "plain rows", False, RANK),
        ("annbatch", "plain rows", False, RAW),
        ("annbatch", "rank-ordered rows", True, RANK),
    )
}
PEERS |= {
    ("annbatch", f"{rows}, our tokenizer", CONTINUOUS): (
        lambda corpus, batch, order=order: annbatch(
            corpus, batch, CONTINUOUS, order, our_tokenizer=True
        )
    )
    for rows, order in (("plain rows", False), ("rank-ordered rows", True))
}
PEERS |= {
    ("scdataset", "", RANK): lambda corpus, batch: scdataset(corpus, batch, RANK),
    ("scdataset", "", RAW): lambda corpus, batch: scdataset(corpus, batch, RAW),
    ("bionemo-scdl", "", CONTINUOUS): lambda corpus, batch: scdl(corpus, batch, CONTINUOUS),
    ("bionemo-scdl", "", RAW): lambda corpus, batch: scdl(corpus, batch, RAW),
    ("torch", "AnnLoader, in memory", RAW): annloader,
}
