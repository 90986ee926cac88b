"""Other loaders over the cells of `loader.py`, each in the form and with the settings that its
documentation gives.

A function `peer(corpus, batch)` gives epochs, each an iterator of the number of cells of its
batches. Stores are written when a peer is first opened.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
from loader_corpus import (
    BLOCK_CELLS,
    MAX_TOKENS,
    WINDOW_BLOCKS,
    Corpus,
    one_writer,
    shuffled_cells,
    write_plain,
)

from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.data.arrays import counts_per_10k
from cellmill.data.rank_order import RankOrder, inverse_medians
from cellmill.data.rows import SparseCounts

Epochs = Iterator[Iterator[int]]
RAW = "genes and counts"
RANK = "rank tokens"
CONTINUOUS = "continuous tokens"


def annbatch(
    corpus: Corpus,
    batch: int,
    gives: str,
    *,
    in_rank_order: bool = False,
    our_tokenizer: bool = False,
    codecs: bool = False,
) -> Epochs:
    """Chunks of 64 cells, 128 at a time, from a sharded zarr store read by zarrs: its fastest
    setting here.

    Continuous tokens are made by numpy, or by `our_tokenizer`, so that only the loaders differ. The
    store has no codecs, which is faster, or with `codecs` the default ones.
    """
    package = importlib.import_module("annbatch")
    zarr = importlib.import_module("zarr")
    if importlib.util.find_spec("zarrs"):
        importlib.import_module("zarrs")
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    ranking = RankOrder(inverse_medians(corpus.vocabulary.medians))
    rows = "ranked" if in_rank_order else "plain"
    store = corpus.cells.parent / f"annbatch-{rows}{'-codecs' * codecs}.zarr"
    with one_writer(store.parent):
        if not (store / "zarr.json").exists():
            cells = shuffled_cells(corpus)
            if in_rank_order:
                sort_rows(cells.X, ranking)
            group = zarr.open_group(store, mode="w", zarr_format=3)
            chosen = {} if codecs else {"compressors": ()}
            package.write_sharded(group, cells, n_obs_per_chunk=BLOCK_CELLS, **chosen)
    make = {
        RAW: n_rows,
        RANK: prefixes if in_rank_order else lambda rows: ranked(rows, ranking),
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
    with one_writer(corpus.cells.parent):
        path = write_plain(corpus)
    cells = ad.read_h5ad(path, backed="r")
    strategy = package.BlockShuffling(block_size=BLOCK_CELLS)
    loader = package.scDataset(
        cells,
        strategy,
        batch,
        fetch_factor=64,
        fetch_callback=lambda backed, rows: backed.X[rows],
        seed=0,
    )
    ranking = RankOrder(inverse_medians(corpus.vocabulary.medians))
    make = {RAW: n_rows, RANK: lambda rows: ranked(rows, ranking)}
    while True:
        yield map(make[gives], loader)


def scdl(corpus: Corpus, batch: int, gives: str) -> Epochs:
    """Single rows of a memory map at random, put together to batches."""
    package = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    store = corpus.cells.parent / "scdl"
    with one_writer(store.parent):
        source: dict[str, Any] = {}
        if not store.exists():
            source = {"h5ad_path": str(write_plain(corpus)), "use_X_not_raw": True}
        dataset = package.SingleCellMemMapDataset(str(store), **source)

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


def bpcells(corpus: Corpus, batch: int) -> Epochs:
    """Bit-packed rows of a folder: windows of 128 shuffled blocks of 64 cells, which are shuffled in
    memory. It has no loader: this is how its indexing gives batches. A block is read at a time,
    since 0.3.0rc2 ends the process when 640 cells are indexed at once.
    """
    package = importlib.import_module("bpcells.experimental")
    store = corpus.cells.parent / "bpcells"
    with one_writer(store.parent):
        if not store.exists():
            # its rows are columns of the packed matrix: a matrix of genes x cells, by cell
            columns = shuffled_cells(corpus).X.T.tocsc().astype(np.uint32)
            package.DirMatrix.from_scipy_sparse(columns, str(store))
    matrix = package.DirMatrix(str(store))

    def epoch(seed: int) -> Iterator[int]:
        draw = np.random.default_rng(seed)
        blocks = draw.permutation(-(-corpus.n_cells // BLOCK_CELLS))
        for first in range(0, len(blocks), WINDOW_BLOCKS):
            parts = []
            for block in blocks[first : first + WINDOW_BLOCKS].tolist():
                stop = min((block + 1) * BLOCK_CELLS, corpus.n_cells)
                parts.append(matrix[:, np.arange(block * BLOCK_CELLS, stop)].T)
            window = sp.vstack(parts, format="csr")
            order = draw.permutation(window.shape[0])
            for start in range(0, len(order), batch):
                yield n_rows(window[order[start : start + batch]])

    seed = 0
    while True:
        yield epoch(seed)
        seed += 1


def annloader(corpus: Corpus, batch: int) -> Epochs:
    """AnnLoader over cells in memory; 16 batches of an epoch, since a whole one takes minutes."""
    module = importlib.import_module("anndata.experimental")
    with one_writer(corpus.cells.parent):
        path = write_plain(corpus)
    loader = module.AnnLoader(ad.read_h5ad(path), batch_size=batch, shuffle=True)
    while True:
        yield islice((made.X.shape[0] for made in loader), 16)


def n_rows(matrix: Any) -> int:
    return int(matrix.shape[0])


def sort_rows(matrix: sp.csr_matrix, ranking: RankOrder) -> None:
    """Put rows into rank order, in place, by the function that orders our shards."""
    indptr = matrix.indptr.astype(np.int64)
    genes = np.array(matrix.indices, np.int32)
    counts = np.array(matrix.data, np.uint16)
    ranking.sort(SparseCounts(indptr, genes, counts))
    matrix.indices = genes
    matrix.data = counts


def ranked(matrix: sp.csr_matrix, ranking: RankOrder) -> int:
    """Rank tokens made of a batch, cut as ours are."""
    sort_rows(matrix, ranking)
    return prefixes(matrix)


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
        cells = SparseCounts(matrix.indptr.astype(np.int64), matrix.indices, matrix.data)
        return len(tokenizer.tokenize(cells).cu_seqlens) - 1

    return make


def tokens(genes: np.ndarray, indptr: np.ndarray) -> int:
    cut = packed(genes, indptr)
    np.add(cut, 2, out=cut)
    return len(indptr) - 1


def packed(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """The first `MAX_TOKENS` of each row, one row after another."""
    kept = np.minimum(np.diff(indptr), MAX_TOKENS)
    return np.concatenate([values[a : a + n] for a, n in zip(indptr.tolist(), kept.tolist())])


Peer = Callable[[Corpus, int], Epochs]
PEERS: dict[tuple[str, str, str], Peer] = {
    ("annbatch", "plain rows", CONTINUOUS): partial(annbatch, gives=CONTINUOUS),
    ("annbatch", "plain rows, our tokenizer", CONTINUOUS): partial(
        annbatch, gives=CONTINUOUS, our_tokenizer=True
    ),
    ("annbatch", "rank-ordered rows, our tokenizer", CONTINUOUS): partial(
        annbatch, gives=CONTINUOUS, in_rank_order=True, our_tokenizer=True
    ),
    ("annbatch", "default codecs, our tokenizer", CONTINUOUS): partial(
        annbatch, gives=CONTINUOUS, our_tokenizer=True, codecs=True
    ),
    ("annbatch", "plain rows", RANK): partial(annbatch, gives=RANK),
    ("annbatch", "rank-ordered rows", RANK): partial(annbatch, gives=RANK, in_rank_order=True),
    ("annbatch", "rank-ordered rows, default codecs", RANK): partial(
        annbatch, gives=RANK, in_rank_order=True, codecs=True
    ),
    ("annbatch", "plain rows", RAW): partial(annbatch, gives=RAW),
    ("annbatch", "default codecs", RAW): partial(annbatch, gives=RAW, codecs=True),
    ("scdataset", "", RANK): partial(scdataset, gives=RANK),
    ("scdataset", "", RAW): partial(scdataset, gives=RAW),
    ("bionemo-scdl", "", CONTINUOUS): partial(scdl, gives=CONTINUOUS),
    ("bionemo-scdl", "", RAW): partial(scdl, gives=RAW),
    ("bpcells", "", RAW): bpcells,
    ("torch", "AnnLoader, in memory", RAW): annloader,
}
STORES = {
    "annbatch": "annbatch-plain.zarr",
    "annbatch, default codecs": "annbatch-plain-codecs.zarr",
    "annbatch, rank-ordered rows": "annbatch-ranked.zarr",
    "annbatch, rank-ordered rows, default codecs": "annbatch-ranked-codecs.zarr",
    "bionemo-scdl": "scdl",
    "bpcells": "bpcells",
}
"""Folders of the peers' stores."""
