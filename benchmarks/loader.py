"""Cells per CPU-second of the data engine, and of other loaders where they are installed, over the same cells.

Prints one table, with the machine, the commit and the command; its ratio is our best rank tokens over the row.
CPU-seconds are those of all threads of the process, so the figures hold on a machine that is shared; each is the
median of whole epochs over a warm page cache, after one that is not counted.
annbatch, scDataset, bionemo-scdl (SCDL) and anndata's AnnLoader are measured when they can be
imported; each reads the cells in the form that its documentation recommends, written beforehand.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import Shard
from cellmill.config.run import Stream as StreamOptions
from cellmill.config.tokens import Tokens
from cellmill.data.counts_writer import write_cells
from cellmill.data.gene_ranking import inverse_medians, rank_order_rows
from cellmill.data.manifest import Manifest
from cellmill.data.prefetch import Prefetch
from cellmill.data.shard_file import open_shards
from cellmill.data.shard_writer import write_shards
from cellmill.data.shuffle import EpochLayout
from cellmill.data.stream import CellStream
from cellmill.data.vocabulary import Vocabulary

GENES, MEAN_NONZEROS, SD_NONZEROS = 20_000, 2_040, 400
BLOCK_CELLS, WINDOW_BLOCKS = 64, 128
MAX_TOKENS = 2_048
WORLD = 4  # ranks among which cells are counted


@dataclass(frozen=True)
class Corpus:
    """What the loaders read."""

    cells: Path
    manifest: Path
    vocabulary: Vocabulary
    n_cells: int


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    loader: str
    gives: str
    cells_per_cpu_s: float
    cells_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=64, help="cells of a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="epochs counted (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where data are made, and kept; default: a temporary folder")
    arguments = parser.parse_args()
    print(f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`")
    with tempfile.TemporaryDirectory(prefix="cellmill-loader-") as folder:
        corpus = make_corpus(arguments.folder or Path(folder), arguments.cells)
        rows = list(measure_all(corpus, arguments.batch, arguments.repeats))
        resume_s = statistics.median(first_batch_after_resume(corpus, arguments.batch) for _ in range(5))
        lost, repeated = count_cells(corpus, arguments.batch)
    best = max(row.cells_per_cpu_s for row in rows if row.loader.startswith("cellmill") and row.gives == "rank tokens")
    head = "cells per CPU-second | cells per second | ratio"
    print(f"\n| loader, batches of {arguments.batch} | gives | {head} |\n|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row.cells_per_cpu_s:,.0f} | {row.cells_per_s:,.0f} | {best / row.cells_per_cpu_s:.1f}"
        print(f"| {row.loader} | {row.gives} | {numbers} |")
    print(f"\nfirst batch after resume: {resume_s:.3f} s")
    print(f"one epoch over {WORLD} ranks: {lost} cells lost, {repeated} repeated")


def measure_all(corpus: Corpus, batch: int, repeats: int) -> Iterator[Row]:
    """Every loader that can be imported, ours first. One that fails is named on stderr and left out."""
    for lanes, window in ((1, WINDOW_BLOCKS), (8, WINDOW_BLOCKS // 8)):
        options = StreamOptions(lanes=lanes, block_cells=BLOCK_CELLS, window_blocks=window)
        name = f"cellmill, {lanes} lane{'s' * (lanes > 1)}"
        yield measure(name, "genes and counts", own_rows(corpus, options, batch), corpus.n_cells, repeats)
        for tokenizer in ("rank", "continuous", "binned"):
            batches = own_tokens(corpus, options, batch, tokenizer)
            yield measure(name, f"{tokenizer} tokens", batches, corpus.n_cells, repeats)
    peers = (("annbatch", annbatch), ("scdataset", scdataset), ("bionemo-scdl", scdl), ("torch", annloader))
    for package, peer in peers:
        try:
            version(package)
        except PackageNotFoundError:
            print(f"{package} is not installed: left out", file=sys.stderr)
            continue
        try:
            yield from peer(corpus, batch, repeats)
        except Exception as error:  # another version of a peer is no reason to lose the table
            print(f"{package} failed and is left out: {type(error).__name__}: {error}", file=sys.stderr)


def measure(loader: str, gives: str, epochs: Iterator[Iterator[int]], n_cells: int, repeats: int) -> Row:
    """Medians over epochs; each of `epochs` gives the number of cells of its batches."""
    assert sum(next(epochs)) > 0.99 * n_cells, f"{loader} lost cells"
    cpu_s, wall_s = [], []
    for epoch in islice(epochs, repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        n = sum(epoch)
        cpu_s.append((time.process_time() - cpu) / n)
        wall_s.append((time.perf_counter() - wall) / n)
    epochs.close()  # type: ignore[attr-defined]
    return Row(loader, gives, 1 / statistics.median(cpu_s), 1 / statistics.median(wall_s))


def own_tokens(corpus: Corpus, options: StreamOptions, batch: int, tokenizer: str) -> Iterator[Iterator[int]]:
    stream = open_stream(corpus, options, batch, tokenizer)
    batches = iter(stream)
    try:
        while True:
            yield (sum(len(b.cells) for b in next(batches)) for _ in range(stream.steps_per_epoch))
    finally:
        stream.close()


def own_rows(corpus: Corpus, options: StreamOptions, batch: int) -> Iterator[Iterator[int]]:
    manifest = Manifest.read(corpus.manifest)
    shards = open_shards(manifest, "train")
    sizes = tuple(shard.n_obs for shard in shards)
    layout = EpochLayout(sizes, options.lanes, options.block_cells, options.window_blocks, batch, seed=0, shuffle=True)
    lanes = list(range(options.lanes))
    rows = Prefetch(shards, layout, lanes, max_genes=None, io_threads=options.io_threads)
    steps = rows.steps(0, 0)
    try:
        while True:
            yield (len(next(steps).cells) for _ in range(layout.steps_per_epoch))
    finally:
        rows.close()


def open_stream(
    corpus: Corpus, options: StreamOptions, batch: int, tokenizer: str, rank: int = 0, world: int = 1
) -> CellStream:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": MAX_TOKENS})
    sizes = {"global_batch": batch, "token_budget": batch * MAX_TOKENS}
    return CellStream(corpus.manifest, "train", tokens, options, **sizes, rank=rank, world=world, seed=0)


def first_batch_after_resume(corpus: Corpus, batch: int) -> float:
    """Seconds from opening the manifest to the first batch, in the middle of an epoch."""
    options = StreamOptions(lanes=8, block_cells=BLOCK_CELLS, window_blocks=WINDOW_BLOCKS // 8)
    stream = open_stream(corpus, options, batch, "rank")
    state = stream.state_dict() | {"epoch": 3, "step": stream.steps_per_epoch // 2}
    stream.close()
    start = time.perf_counter()
    stream = open_stream(corpus, options, batch, "rank")
    stream.load_state_dict(state)
    next(iter(stream))
    seconds = time.perf_counter() - start
    stream.close()
    return seconds


def count_cells(corpus: Corpus, batch: int) -> tuple[int, int]:
    """Cells that no rank saw in an epoch, and times that one was seen again."""
    seen = np.zeros(corpus.n_cells, np.int64)
    for rank in range(WORLD):
        options = StreamOptions(lanes=8, block_cells=BLOCK_CELLS, window_blocks=WINDOW_BLOCKS // 8)
        stream = open_stream(corpus, options, batch, "rank", rank, WORLD)
        for step in islice(stream, stream.steps_per_epoch):
            for made in step:
                seen += np.bincount(made.cells, minlength=corpus.n_cells)
        stream.close()
    return int((seen == 0).sum()), int(np.maximum(seen - 1, 0).sum())


def annbatch(corpus: Corpus, batch: int, repeats: int) -> Iterator[Row]:
    """Chunks of 64 cells, 128 at a time, from a sharded zarr store read by zarrs: its fastest setting here."""
    package, zarr = importlib.import_module("annbatch"), importlib.import_module("zarr")
    name = f"annbatch {version('annbatch')}"
    if importlib.util.find_spec("zarrs"):
        importlib.import_module("zarrs")
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        name += " + zarrs"
    weights = inverse_medians(corpus.vocabulary.medians)
    for compressors, how in (((), "no compression"), (None, "its default compression")):
        store = corpus.cells.parent / f"annbatch-{how.replace(' ', '-')}.zarr"
        group = zarr.open_group(store, mode="w", zarr_format=3)
        options = {} if compressors is None else {"compressors": compressors}
        package.write_sharded(group, shuffled_cells(corpus), n_obs_per_chunk=BLOCK_CELLS, **options)

        def batches(store: Path = store) -> Iterator[sp.csr_matrix]:
            matrix = ad.io.sparse_dataset(zarr.open_group(store, mode="r")["X"])
            sizes = {"chunk_size": BLOCK_CELLS, "preload_nchunks": WINDOW_BLOCKS, "batch_size": batch}
            loader = package.Loader(shuffle=True, preload_to_gpu=False, **sizes).add_dataset(matrix)
            return (made["X"] for made in loader)

        raw = (map(n_rows, batches()) for _ in iter(int, 1))
        yield measure(f"{name}, {how}", "genes and counts", raw, corpus.n_cells, repeats)
        tokens = ((ranked(made, weights) for made in batches()) for _ in iter(int, 1))
        yield measure(f"{name}, {how}", "rank tokens", tokens, corpus.n_cells, repeats)


def scdataset(corpus: Corpus, batch: int, repeats: int) -> Iterator[Row]:
    """Blocks of 64 cells, 64 batches fetched at a time, from contiguous CSR in an .h5ad."""
    package = importlib.import_module("scdataset")
    cells = ad.read_h5ad(corpus.cells, backed="r")
    strategy = package.BlockShuffling(block_size=BLOCK_CELLS)
    loader = package.scDataset(
        cells, strategy, batch, fetch_factor=64, fetch_callback=lambda backed, rows: backed.X[rows], seed=0
    )
    weights = inverse_medians(corpus.vocabulary.medians)
    name = f"scDataset {version('scdataset')}"
    raw = (map(n_rows, loader) for _ in iter(int, 1))
    yield measure(name, "genes and counts", raw, corpus.n_cells, repeats)
    tokens = ((ranked(made, weights) for made in loader) for _ in iter(int, 1))
    yield measure(name, "rank tokens", tokens, corpus.n_cells, repeats)
    cells.file.close()


def scdl(corpus: Corpus, batch: int, repeats: int) -> Iterator[Row]:
    """Single rows of a memory map at random, put together to batches."""
    package = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    with tempfile.TemporaryDirectory(dir=corpus.cells.parent) as folder:
        dataset = package.SingleCellMemMapDataset(
            str(Path(folder) / "scdl"), h5ad_path=str(corpus.cells), use_X_not_raw=True
        )

        def epoch(seed: int) -> Iterator[int]:
            order = np.random.default_rng(seed).permutation(corpus.n_cells)
            for first in range(0, len(order), batch):
                rows = [dataset.get_row(int(cell))[0] for cell in order[first : first + batch]]
                np.concatenate([values for values, _ in rows])
                np.concatenate([genes for _, genes in rows])
                yield len(rows)

        epochs = (epoch(seed) for seed in range(repeats + 1))
        yield measure(f"SCDL {version('bionemo-scdl')}", "genes and counts", epochs, corpus.n_cells, repeats)


def annloader(corpus: Corpus, batch: int, repeats: int) -> Iterator[Row]:
    """AnnLoader over cells in memory; some batches of an epoch, since a whole one takes minutes."""
    module, some = importlib.import_module("anndata.experimental"), min(16 * batch, corpus.n_cells)
    loader = module.AnnLoader(ad.read_h5ad(corpus.cells), batch_size=batch, shuffle=True)
    epochs = (islice((made.X.shape[0] for made in loader), 16) for _ in iter(int, 1))
    yield measure(f"AnnLoader {version('anndata')}, in memory", "genes and counts", epochs, some, repeats)


def n_rows(matrix: Any) -> int:
    return int(matrix.shape[0])


def ranked(matrix: sp.csr_matrix, weights: np.ndarray) -> int:
    """Rank tokens made of a batch by the function that orders our shards, cut as ours are."""
    indptr = matrix.indptr.astype(np.int64)
    genes, _ = rank_order_rows(indptr, matrix.indices, matrix.data, weights)
    kept = np.minimum(np.diff(indptr), MAX_TOKENS)
    packed = np.concatenate([genes[a : a + n] for a, n in zip(indptr.tolist(), kept.tolist())])
    np.add(packed, 2, out=packed)
    return len(kept)


def make_corpus(folder: Path, n_cells: int) -> Corpus:
    """Simulated cells with log-normal expression, as preprocessed cells and as shards; made once for a folder."""
    ids = [f"ENSG{gene:011d}" for gene in range(GENES)]
    medians = np.random.default_rng(1).lognormal(0, 0.5, GENES).astype(np.float32)
    vocabulary = Vocabulary(ids, ids, np.full(GENES, n_cells), medians)
    corpus = Corpus(
        folder / f"cells-{n_cells}.h5ad", folder / f"shards-{n_cells}" / "manifest.json", vocabulary, n_cells
    )
    if not corpus.manifest.exists():
        blocks = list(simulate(n_cells))
        obs, var = pd.DataFrame(index=[f"cell{i}" for i in range(n_cells)]), pd.DataFrame({"symbol": ids}, index=ids)
        write_cells(corpus.cells, obs, var, blocks, sum(block.nnz for block in blocks), np.dtype("<u2"))
        write_shards([corpus.cells], vocabulary, Shard(val_frac=0, test_frac=0), corpus.manifest)
    return corpus


def simulate(n_cells: int, block: int = 512) -> Iterator[sp.csr_matrix]:
    rng = np.random.default_rng(0)
    scale = 1 / rng.lognormal(0, 1, GENES)
    for first in range(0, n_cells, block):
        sizes = np.clip(rng.normal(MEAN_NONZEROS, SD_NONZEROS, min(block, n_cells - first)), 600, 4_000).astype(int)
        # the genes that would come first in a race with their rates: sampling by weight without replacement
        genes = [np.sort(np.argpartition(rng.exponential(size=GENES) * scale, size)[:size]) for size in sizes]
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        counts = rng.geometric(0.45, indptr[-1]).astype(np.uint16)
        yield sp.csr_matrix((counts, np.concatenate(genes).astype(np.int32), indptr), shape=(len(sizes), GENES))


def shuffled_cells(corpus: Corpus) -> ad.AnnData:
    """All cells in memory in random order, as a preshuffling writer would store them."""
    cells = ad.read_h5ad(corpus.cells)
    return cells[np.random.default_rng(0).permutation(corpus.n_cells)].copy()


def machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = f"{len(lines)} x {lines[0].split(': ')[1]}" if lines else model
    return f"{model}, Python {platform.python_version()}, numpy {np.__version__}"


def commit() -> str:
    folder = Path(__file__).parent
    git: Callable[..., Any] = lambda *words: subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)  # noqa: E731
    changed = "+" if git("status", "--porcelain", "../src").stdout.strip() else ""
    return (git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown") + changed


if __name__ == "__main__":
    main()
