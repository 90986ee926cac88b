"""Sequences on their way to shards: the records that stay.

A sequence is treated as a cell whose genes are its residues in order. Quality control is its length
(`preprocess.min_counts`) and uniqueness: of equal sequences in a file the first stays. Cells of which only the rank
order of their genes is known (`ranked`) are rows of the same kind; their genes have ids and medians.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import NO_COLUMNS, ObsColumns
from cellmill.data.inputs.h5 import count_dtype, write_cells
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.prepare.preprocess import distributions
from cellmill.errors import DataError
from cellmill.files import progress

DROPPED = ("filter", "no residues", "min_counts", "duplicate")
"""Reasons to drop a sequence; the first that holds counts."""
RANKED = ("filter", "no genes", "min_genes", "duplicate")
"""The same of a cell of ranks."""


def preprocess_sequences(
    reader: CountsReader, options: Preprocess, out: Path, columns: ObsColumns = NO_COLUMNS
) -> dict[str, Any]:
    """Write the sequences of `reader` that stay to `out`; return the report, JSON-able and of the form of cells'.

    Raises DataError when a column of `keep_obs` or `columns` is missing, or nothing is left.
    """
    chosen = choose_obs(reader, options.keep_obs, columns)
    lengths, reason = _measure(reader, options, chosen.keep)
    kept = reason < 0
    names = RANKED if reader.ranked else DROPPED
    dropped = {name: int((reason == number).sum()) for number, name in enumerate(names)}
    if not kept.any():
        what = "cells" if reader.ranked else "sequences"
        raise DataError(f"{reader.path}: none of {reader.n_obs:,} {what} is left: {dropped}; lower {names[2]}")

    def kept_rows() -> Iterator[sp.csr_matrix]:
        first = 0
        for block in reader.rows(options.row_block):
            yield block[np.flatnonzero(kept[first : first + block.shape[0]])]
            first += block.shape[0]

    nnz, dtype, ranked = int(lengths[kept].sum()), count_dtype(1), reader.ranked
    write_cells(out, chosen.kept(kept), reader.var, kept_rows(), nnz, dtype, True, options.compression, ranked)
    n, measure = reader.n_vars, "n_genes" if ranked else "n_residues"
    report = {
        "cells": {"in": reader.n_obs, "out": int(kept.sum()), "dropped": dropped},
        "genes": {"in": n, "out": n, "dropped": {}},
        "coverage": {"frac": 1.0, "n_genes": n},
        "nnz": nnz,
        "dtype": dtype.name,
    }
    return report | distributions(options, {measure: lengths}, kept) | chosen.label_report(kept)


def _measure(reader: CountsReader, options: Preprocess, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Length of each sequence, and why it is dropped: index into DROPPED, or -1."""
    lengths, reasons, seen = list[int](), list[int](), set[bytes]()
    least = options.min_genes if reader.ranked else options.min_counts
    unit = "cells" if reader.ranked else "sequences"
    for block in progress(reader.rows(options.row_block), f"preprocess {reader.path.stem}", reader.n_obs, unit):
        for start, stop in pairwise(block.indptr.tolist()):
            # 16 bytes a sequence: a collision among a billion has a probability of 10^-21
            key = hashlib.blake2b(block.indices[start:stop].astype("<i4").tobytes(), digest_size=16).digest()
            checks = (not keep[len(reasons)], start == stop, stop - start < least, key in seen)
            lengths.append(stop - start)
            reasons.append(checks.index(True) if any(checks) else -1)
            if not any(checks):
                seen.add(key)
    return np.array(lengths, np.int64), np.array(reasons, np.int8)
