"""The least that shuffled cells can cost: a loop in C that copies each row from a mapped file to
its place in a window; reads of blocks into a window; and a loop in C that makes tokens of it, batch
by batch, in memory that stays in cache.

They know where each row is and where it goes before they are timed. What they do not do: choose an
order, keep lanes apart, read ahead, check a length, or keep a batch.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from loader_corpus import BLOCK_CELLS, MAX_TOKENS, WINDOW_BLOCKS, Corpus
from loader_peers import CONTINUOUS, RANK, RAW

from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards

Window = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
void scatter(int64_t rows, const char **genes, const char **counts, int64_t width, const int64_t *shard,
             const int64_t *from, const int64_t *length, const int64_t *to, char *out_genes, char *out_counts) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(out_genes + 4 * to[i], genes[shard[i]] + 4 * from[i], 4 * length[i]);
        memcpy(out_counts + width * to[i], counts[shard[i]] + width * from[i], width * length[i]);
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


def c_loop(corpus: Corpus, batch: int) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells. Raises FileNotFoundError without a C compiler."""
    scatter = _compiled("scatter")
    shards = open_shards(Manifest.read(corpus.manifest), "train")
    mapped = [np.memmap(shard.path, np.uint8, mode="r") for shard in shards]
    genes, counts = (
        (ctypes.c_void_p * len(shards))(
            *(m.ctypes.data + at.offset for m, at in zip(mapped, stored))
        )
        for stored in ([shard.genes for shard in shards], [shard.counts for shard in shards])
    )
    width = max(shard.dtype.itemsize for shard in shards)
    assert all(shard.dtype.itemsize == width for shard in shards)
    windows = list(_windows([shard.indptr for shard in shards]))
    largest = max(int(length.sum()) for _, _, length, _ in windows)
    out_genes = np.empty(4 * largest, np.uint8)
    out_counts = np.empty(width * largest, np.uint8)

    def epoch() -> Iterator[int]:
        for shard, start, length, target in windows:
            where = map(_pointer, (shard, start, length, target))
            rows = ctypes.c_int64(len(shard))
            scatter(
                rows,
                genes,
                counts,
                ctypes.c_int64(width),
                *where,
                _pointer(out_genes),
                _pointer(out_counts),
            )
            yield len(shard)

    while True:
        yield epoch()


def c_tokens(corpus: Corpus, batch: int, gives: str) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells: blocks are read into the window, and tokens, if
    any, made of it.
    """
    make = _compiled("tokens")
    shards = open_shards(Manifest.read(corpus.manifest), "train")
    assert all(shard.dtype.itemsize == 2 for shard in shards)
    files = [open(shard.path, "rb") for shard in shards]  # noqa: SIM115, as long as the process
    windows = list(map(_planned, _windows([shard.indptr for shard in shards])))
    most = max(int(length.sum()) for _, (_, length, _) in windows)
    genes = np.empty(most, np.int32)
    counts = np.empty(most, np.uint16)
    ids, values = np.empty((2, batch * MAX_TOKENS), np.int32)

    def epoch() -> Iterator[int]:
        for blocks, (start, length, kept) in windows:
            for at, first, place, n in blocks:
                for array, stored in ((genes, shards[at].genes), (counts, shards[at].counts))[
                    : 1 + (gives != RANK)
                ]:
                    offset = stored.offset + array.itemsize * first
                    assert (
                        os.preadv(files[at].fileno(), [array[place : place + n]], offset)
                        == n * array.itemsize
                    )
            for cell in range(0, len(kept) if gives != RAW else 0, batch):
                rows = slice(cell, cell + batch)
                to = np.cumsum(kept[cell : cell + batch]) - kept[cell : cell + batch]
                where = map(
                    _pointer,
                    (genes, counts, start[rows], length[rows], kept[rows], to, ids, values),
                )
                make(ctypes.c_int64(len(to)), *where, ctypes.c_int(gives == CONTINUOUS))
            yield len(kept)

    while True:
        yield epoch()


def _planned(window: Window) -> tuple[list[list[int]], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Shard, first nonzero, place and nonzeros of each read, and start, nonzeros and tokens of
    cells in their order.
    """
    shard, start, length, target = window
    place = np.cumsum(length) - length  # of each row, as it is read
    first = np.flatnonzero(
        np.append(True, (shard[1:] != shard[:-1]) | (start[1:] != (start + length)[:-1]))
    )
    nonzeros = np.add.reduceat(length, first)
    order = np.argsort(target)
    rows = place[order], length[order], np.minimum(length[order], MAX_TOKENS)
    return np.stack([shard[first], start[first], place[first], nonzeros], axis=1).tolist(), rows


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _windows(indptr: list[np.ndarray]) -> Iterator[Window]:
    """Shard, first nonzero, nonzeros and place of each row of shuffled windows of shuffled blocks,
    in disk order.
    """
    draw = np.random.default_rng(0)
    shard = np.concatenate([np.full(len(of) - 1, at) for at, of in enumerate(indptr)])
    start, length = (np.concatenate(parts).astype(np.int64) for parts in (
        [of[:-1] for of in indptr], [np.diff(of) for of in indptr],
    ))  # fmt: skip
    blocks = draw.permutation(-(-len(shard) // BLOCK_CELLS))
    for first in range(0, len(blocks), WINDOW_BLOCKS):
        rows = (
            blocks[first : first + WINDOW_BLOCKS, None] * BLOCK_CELLS + np.arange(BLOCK_CELLS)
        ).ravel()
        rows = rows[rows < len(shard)]
        order = draw.permutation(len(rows))  # the row at each place of the window
        target = np.empty(len(rows), np.int64)
        target[order] = np.cumsum(length[rows[order]]) - length[rows[order]]
        yield shard[rows].astype(np.int64), start[rows], length[rows], target


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
