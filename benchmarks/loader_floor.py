"""The least that shuffled cells can cost: a loop in C that copies each row from a mapped file to
its place in a window; reads of blocks into a window; and a loop in C that makes tokens of it, batch
by batch, in memory that stays in cache.

They know where each row is and where it goes before they are timed. What they do not do: choose an
order, keep lanes apart, read ahead, check a length, or keep a batch. The loops read the rows of the
shards as plain CSR, int32 and uint16 in two files that are written here: these yardsticks stay the
same whatever the shards' format is. Reads alone have the packed bytes of the shards, and nothing is
unpacked.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from loader_corpus import BLOCK_CELLS, MAX_TOKENS, WINDOW_BLOCKS, Corpus, one_writer
from loader_peers import CONTINUOUS, RANK

from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards

SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
void scatter(int64_t rows, const int32_t *genes, const uint16_t *counts, const int64_t *from, const int64_t *length,
             const int64_t *to, int32_t *out_genes, uint16_t *out_counts) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(out_genes + to[i], genes + from[i], 4 * length[i]);
        memcpy(out_counts + to[i], counts + from[i], 2 * length[i]);
    }
}
void tokens(int64_t rows, const int32_t *genes, const uint16_t *counts, const int64_t *from, const int64_t *length,
            const int64_t *kept, const int64_t *to, int32_t *ids, int32_t *places, int continuous) {
    float of_count[64], *values = (float *)places;
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *own = genes + from[r];
        const uint16_t *count = counts + from[r];
        for (int64_t i = 0; i < kept[r]; i++) ids[to[r] + i] = own[i] + 2;
        if (!continuous) {
            for (int64_t i = 0; i < kept[r]; i++) places[to[r] + i] = i;
            continue;
        }
        uint64_t total = 0;
        for (int64_t i = 0; i < length[r]; i++) total += count[i];
        float scale = 1e4f / total;
        for (int i = 0; i < 64; i++) of_count[i] = log1pf(i * scale);
        for (int64_t i = 0; i < kept[r]; i++)
            values[to[r] + i] = count[i] < 64 ? of_count[count[i]] : log1pf(count[i] * scale);
    }
}
"""


class PlainRows(NamedTuple):
    """Rows of the shards as CSR."""

    genes: Path  # int32
    counts: Path  # uint16
    starts: np.ndarray  # `(cells + 1,)` int64


def plain_rows(corpus: Corpus) -> PlainRows:
    """Rows of all shards, written once, in their order."""
    shards = open_shards(Manifest.read(corpus.manifest), "train")
    assert all(shard.kind.dtype.itemsize == 2 for shard in shards)
    lengths = [np.diff(shard.indptr.astype(np.int64)) for shard in shards]
    folder = corpus.manifest.parent
    paths = [folder / "plain-genes.bin", folder / "plain-counts.bin"]
    with one_writer(corpus.cells.parent):
        if not paths[1].exists():
            made = [path.with_suffix(".part") for path in paths]
            with open(made[0], "wb") as genes_file, open(made[1], "wb") as counts_file:
                for shard in shards:
                    for first in range(0, shard.n_obs, 1_024):
                        rows = shard.read(first, min(1_024, shard.n_obs - first))
                        genes_file.write(rows[1].data)
                        counts_file.write(rows[2].data)
            for part, path in zip(made, paths):
                part.replace(path)
    return PlainRows(*paths, np.cumsum(np.concatenate([[0], *lengths])))


def c_loop(corpus: Corpus, batch: int) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells. Raises FileNotFoundError without a C compiler."""
    scatter = _compiled("scatter")
    rows = plain_rows(corpus)
    genes = np.memmap(rows.genes, np.int32, mode="r")
    counts = np.memmap(rows.counts, np.uint16, mode="r")
    windows = list(_windows(rows.starts))
    largest = max(int(window.lengths.sum()) for window in windows)
    out_genes = np.empty(largest, np.int32)
    out_counts = np.empty(largest, np.uint16)

    def epoch() -> Iterator[int]:
        for window in windows:
            pointers = map(_pointer, (genes, counts, *window[1:], out_genes, out_counts))
            scatter(ctypes.c_int64(len(window.rows)), *pointers)
            yield len(window.rows)

    while True:
        yield epoch()


def c_tokens(corpus: Corpus, batch: int, gives: str) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells: blocks are read into the window, and tokens made
    of it.
    """
    make = _compiled("tokens")
    rows = plain_rows(corpus)
    files = [open(path, "rb") for path in rows[:2]]  # noqa: SIM115, as long as the process
    windows = [_planned(window) for window in _windows(rows.starts)]
    most = max(int(window.lengths.sum()) for window in windows)
    genes = np.empty(most, np.int32)
    counts = np.empty(most, np.uint16)
    ids, values = np.empty((2, batch * MAX_TOKENS), np.int32)
    arrays = [genes] if gives == RANK else [genes, counts]

    def epoch() -> Iterator[int]:
        for window in windows:
            for array, file in zip(arrays, files):
                _read(file.fileno(), window.reads, array)
            for cell in range(0, len(window.kept), batch):
                chosen = slice(cell, cell + batch)
                kept = window.kept[chosen]
                in_order = (window.starts[chosen], window.lengths[chosen], kept)
                to = np.cumsum(kept) - kept
                where = map(_pointer, (genes, counts, *in_order, to, ids, values))
                make(ctypes.c_int64(len(to)), *where, ctypes.c_int(gives == CONTINUOUS))
            yield len(window.kept)

    while True:
        yield epoch()


def packed_reads(corpus: Corpus, batch: int) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells, whose packed bytes are read."""
    shards = open_shards(Manifest.read(corpus.manifest), "train")
    files = [open(shard.path, "rb") for shard in shards]  # noqa: SIM115, as long as the process
    begins = []
    sizes = []
    cells_before = np.cumsum([0, *(shard.n_obs for shard in shards)])
    for shard in shards:
        cell_starts = shard.part_starts(np.arange(0, 2 * shard.n_obs + 1, 2))
        begins.append(shard.packed.offset + cell_starts[:-1])
        sizes.append(np.diff(cell_starts))
    begin = np.concatenate(begins)
    size = np.concatenate(sizes)
    windows = []
    for window in _windows(np.arange(corpus.n_cells + 1)):
        shard = np.searchsorted(cells_before, window.rows, side="right") - 1
        of_shards = []
        for number in range(len(shards)):
            rows = window.rows[shard == number]
            if len(rows):
                of_shards.append((number, _runs(begin[rows], size[rows])))
        windows.append((len(window.rows), of_shards))
    memory = np.empty(WINDOW_BLOCKS * BLOCK_CELLS * int(size.max()), np.uint8)

    def epoch() -> Iterator[int]:
        for n_cells, of_shards in windows:
            for number, reads in of_shards:
                _read(files[number].fileno(), reads, memory)
            yield n_cells

    while True:
        yield epoch()


class Window(NamedTuple):
    """Rows of a window in disk order, `(rows,)` int64 each."""

    rows: np.ndarray
    starts: np.ndarray  # first nonzero
    lengths: np.ndarray
    targets: np.ndarray  # place of the first nonzero


class Planned(NamedTuple):
    """A window's reads, and its cells in their order, `(cells,)` int64 each."""

    reads: list[list[int]]
    starts: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray  # tokens


def _read(descriptor: int, reads: list[list[int]], memory: np.ndarray) -> None:
    """Read items from each start on to a place in `memory`."""
    width = memory.itemsize
    for start, place, n in reads:
        n_read = os.preadv(descriptor, [memory[place : place + n]], width * start)
        assert n_read == n * width


def _runs(starts: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Start, place and length of each read of rows in disk order, one behind the other in memory."""
    place = np.cumsum(lengths) - lengths
    first = np.flatnonzero(np.append(True, starts[1:] != (starts + lengths)[:-1]))
    n = np.add.reduceat(lengths, first)
    return np.stack([starts[first], place[first], n], axis=1).tolist()


def _planned(window: Window) -> Planned:
    """Plan the reads of a window."""
    lengths = window.lengths
    place = np.cumsum(lengths) - lengths  # of each row, as it is read
    order = np.argsort(window.targets)
    kept = np.minimum(lengths[order], MAX_TOKENS)
    return Planned(_runs(window.starts, lengths), place[order], lengths[order], kept)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _windows(starts: np.ndarray) -> Iterator[Window]:
    """Shuffled windows of shuffled blocks, of rows that begin at `starts`."""
    draw = np.random.default_rng(0)
    n_rows = len(starts) - 1
    length = np.diff(starts)
    blocks = draw.permutation(-(-n_rows // BLOCK_CELLS))
    for first in range(0, len(blocks), WINDOW_BLOCKS):
        rows = (
            blocks[first : first + WINDOW_BLOCKS, None] * BLOCK_CELLS + np.arange(BLOCK_CELLS)
        ).ravel()
        rows = rows[rows < n_rows]
        order = draw.permutation(len(rows))  # the row at each place of the window
        target = np.empty(len(rows), np.int64)
        target[order] = np.cumsum(length[rows[order]]) - length[rows[order]]
        yield Window(rows, starts[rows], length[rows], target)


def _compiled(name: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "loops.c"
        library = Path(folder) / "loops.so"
        source.write_text(SOURCE)
        options = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-o", library, source, "-lm"], check=True)
        function = getattr(ctypes.CDLL(str(library)), name)
    function.restype = None
    return function
