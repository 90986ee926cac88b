"""The least that shuffled rows can cost: a loop in C that copies each row from a mapped file to its place in a window.

It knows where each row is and where it goes before it is timed. What it does not do: choose an order, keep lanes
apart, read ahead, check a length, or give batches.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from loader_corpus import BLOCK_CELLS, WINDOW_BLOCKS, Corpus

from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards

SOURCE = """
#include <stdint.h>
#include <string.h>
void scatter(int64_t rows, const char **genes, const char **counts, int64_t width, const int64_t *shard,
             const int64_t *from, const int64_t *length, const int64_t *to, char *out_genes, char *out_counts) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(out_genes + 4 * to[i], genes[shard[i]] + 4 * from[i], 4 * length[i]);
        memcpy(out_counts + width * to[i], counts[shard[i]] + width * from[i], width * length[i]);
    }
}
"""


def c_loop(corpus: Corpus, batch: int) -> Iterator[Iterator[int]]:
    """Epochs of windows, as numbers of their cells. Raises FileNotFoundError without a C compiler."""
    scatter, shards = _compiled(), open_shards(Manifest.read(corpus.manifest), "train")
    mapped = [np.memmap(shard.path, np.uint8, mode="r") for shard in shards]
    genes, counts = (
        (ctypes.c_void_p * len(shards))(*(m.ctypes.data + at.offset for m, at in zip(mapped, stored)))
        for stored in ([shard.genes for shard in shards], [shard.counts for shard in shards])
    )
    width = max(shard.dtype.itemsize for shard in shards)
    assert all(shard.dtype.itemsize == width for shard in shards)
    windows = list(_windows([shard.indptr for shard in shards]))
    largest = max(int(length.sum()) for _, _, length, _ in windows)
    out_genes, out_counts = np.empty(4 * largest, np.uint8), np.empty(width * largest, np.uint8)

    def epoch() -> Iterator[int]:
        for shard, start, length, target in windows:
            where = (array.ctypes.data_as(ctypes.c_void_p) for array in (shard, start, length, target))
            scatter(
                len(shard),
                genes,
                counts,
                width,
                *where,
                *(ctypes.c_void_p(o.ctypes.data) for o in (out_genes, out_counts)),
            )
            yield len(shard)

    while True:
        yield epoch()


def _windows(indptr: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Shard, first nonzero, nonzeros and place of each row of shuffled windows of shuffled blocks, in disk order."""
    draw = np.random.default_rng(0)
    shard = np.concatenate([np.full(len(of) - 1, at) for at, of in enumerate(indptr)])
    start, length = (np.concatenate(parts).astype(np.int64) for parts in (
        [of[:-1] for of in indptr], [np.diff(of) for of in indptr],
    ))  # fmt: skip
    blocks = draw.permutation(-(-len(shard) // BLOCK_CELLS))
    for first in range(0, len(blocks), WINDOW_BLOCKS):
        rows = (blocks[first : first + WINDOW_BLOCKS, None] * BLOCK_CELLS + np.arange(BLOCK_CELLS)).ravel()
        rows = rows[rows < len(shard)]
        order = draw.permutation(len(rows))  # the row at each place of the window
        target = np.empty(len(rows), np.int64)
        target[order] = np.cumsum(length[rows[order]]) - length[rows[order]]
        yield shard[rows].astype(np.int64), start[rows], length[rows], target


def _compiled() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "scatter.c", Path(folder) / "scatter.so"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).scatter
    function.restype = None
    function.argtypes = [
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 6,
    ]  # fmt: skip
    return function
