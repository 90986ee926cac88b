"""Quality control and gene names of one dataset, in one streaming pass over its counts.

The pass measures every cell, spills the rows that pass to a temporary file of CSR rows, and counts
the cells in which each gene is detected. That determines which genes stay and the number of values,
so the rows can be written as contiguous arrays, and the input, often compressed, is decoded once.
Cells are measured on the genes that a model sees: those with an Ensembl id.

A sequence is treated as a cell whose genes are its residues in order. Quality control is its length
(`preprocess.min_counts`) and uniqueness: of equal sequences in a file the first stays. Cells of
which only the rank order of their genes is known (`ranked`) are rows of the same kind; their genes
have ids and medians.
"""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import NO_COLUMNS, ObsColumns
from cellmill.data import compiled_loops
from cellmill.data.arrays import select_columns, select_rows
from cellmill.data.genes.names import LOST_NAMES, describe_changes, describe_sums
from cellmill.data.inputs.h5 import count_dtype
from cellmill.data.inputs.packed_cells import PackedBlocks, write_packed
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.inputs.source import COUNTS_RULE_KEY, GENE_LENGTH
from cellmill.data.prepare.measure import DROPPED, MeasuredCells, measure_cells
from cellmill.data.prepare.naming import Genes, name_genes
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.prepare.protocols import FullLengthCells, LengthNormalisation, check_protocols
from cellmill.data.saved_work import SavedWork
from cellmill.errors import DataError
from cellmill.files import digest, progress

FORMAT = 1  # format of saved work; raise it when the same counts give other cells
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MIN_ROWS = 1000  # fewer rows show nothing
_MAX_SPARSE_COUNTS = 20  # rows with a median of at most this many counts are no cells
_EMPTIED = DROPPED.index("no gene left")
_PACKED = "packed"
BINS = 40  # bins of each histogram in the report
QUALITY = ("min_genes", "min_counts", "max_mito_frac")  # options of quality control
SEQUENCES_DROPPED = ("filter", "no residues", "min_counts", "duplicate")
"""Reasons to drop a sequence. The first reason that applies is reported."""
RANKED_DROPPED = ("filter", "no genes", "min_genes", "duplicate")
"""Reasons to drop a cell of ranks. The first reason that applies is reported."""


def preprocess_cells(
    reader: CountsReader,
    options: Preprocess,
    out: Path,
    columns: ObsColumns = NO_COLUMNS,
    saved: SavedWork | None = None,
) -> dict[str, Any]:
    """Write the cells and genes of `reader` that pass QC to `out`; return the QC report.

    The report has JSON values. What a killed process has put into `saved` is not done again. Raises
    DataError when too few genes map, a column of `keep_obs` or `columns` is missing, or nothing passes.
    """
    organism_value = options.organism if options.organism_column else None
    chosen = choose_obs(reader, options.keep_obs, columns, organism_value, options.organism)
    full_length = check_protocols(reader, options, chosen.keep)
    genes = name_genes(reader, options)
    normalisation = None
    if full_length is not None and options.gene_length == "normalise":
        normalisation = LengthNormalisation(
            reader, full_length.is_full_length, genes.own_ids, options.organism
        )
    if saved is None:
        saved = SavedWork(out, None)
    named = [genes.gene_ids, genes.target.tolist(), genes.is_mito.tolist()]
    kept = hashlib.sha256(chosen.keep.tobytes()).hexdigest()
    saved.add_facts({"filter": kept, "genes": digest(named)})
    cells = measure_cells(reader, genes, options, chosen.keep, saved, normalisation)
    keep_gene = cells.detected >= max(options.min_cells, 1)
    if not keep_gene.any():
        raise DataError(f"{reader.path}: {_nothing_left(cells, keep_gene, options)}")
    ids = pd.Index(np.array(genes.gene_ids, dtype=object)[keep_gene], name="gene_id")
    var = pd.DataFrame({"symbol": np.array(genes.symbols, dtype=object)[keep_gene]}, index=ids)
    compiled_loops.COMPILED.expect(int(cells.detected[keep_gene].sum()))
    recorded: dict[str, str] = {COUNTS_RULE_KEY: reader.counts_rule} if reader.n_rounded else {}
    if normalisation is not None:
        recorded[GENE_LENGTH] = f"normalised: {full_length}"
    packing = _Packing(reader, keep_gene, cells, saved)
    write_packed(
        out,
        lambda: chosen.kept(cells.reason < 0),  # called after the rows, which mark more cells
        var,
        packing.rows(),
        "genes",
        count_dtype(cells.largest),
        recorded=recorded,
        packed=packing.packed,
    )
    report = _report(reader, options, genes, cells, keep_gene)
    report |= chosen.report(cells.reason < 0, cells.measures["n_counts"])
    if full_length is not None:
        report["full_length"] = {
            "column": full_length.column,
            "cells": full_length.by_name,
            "frac": float(full_length.is_full_length.mean()),
            "gene_length": options.gene_length,
        }
        report["coverage"]["notes"].append(_describe_protocols(full_length, options))
    return report


def _describe_protocols(full_length: FullLengthCells, options: Preprocess) -> str:
    if options.gene_length == "normalise":
        return f"{full_length}: their counts are normalised by gene length"
    return (
        f"warning: {full_length}: their counts grow with gene length; beside cells of other protocols set "
        "preprocess.gene_length to normalise or refuse"
    )


class _Packing:
    """The rows of the kept genes of a file, packed.

    State `packed`, by which a killed process is resumed, has the number of spilled rows and bytes
    so far, and the cells without a kept gene.
    """

    def __init__(
        self, reader: CountsReader, keep_gene: np.ndarray, cells: MeasuredCells, saved: SavedWork
    ) -> None:
        self._cells = cells
        self._keep_gene = keep_gene
        self._saved = saved
        self._label = f"preprocess {reader.path.stem}, writing"
        self._passed = np.flatnonzero(cells.reason < 0)
        stored = saved.restore(_PACKED)
        self.packed = PackedBlocks(saved, "genes", count_dtype(cells.largest), _PACKED)
        self._first = 0
        self._position = 0
        if stored is not None:
            self._first = int(stored["n_rows"])
            self._position = int(stored["position"])
            cells.reason[stored["emptied"]] = _EMPTIED
            print(f"{reader.path.stem}: {self._first:,} cells are packed already", flush=True)

    def rows(self) -> Iterator[sp.csr_matrix]:
        """Yield the rows that are not packed yet.

        The caller adds them to `packed` before it takes the next ones. Marks cells that min_cells left
        without genes in `reason`.
        """
        keep_gene = self._keep_gene
        n_genes = int(keep_gene.sum())
        target = np.where(keep_gene, np.cumsum(keep_gene) - 1, -1).astype(np.int32)
        blocks = self._cells.passing.blocks(self._position)
        n_left = len(self._passed) - self._first
        spilled = progress(blocks, self._label, n_left, size=lambda item: item[0].shape[0])
        for whole, position in spilled:
            block = select_columns(whole, target, n_genes)
            filled = np.diff(block.indptr) > 0
            rows = self._passed[self._first : self._first + len(filled)]
            self._cells.reason[rows[~filled]] = _EMPTIED
            yield select_rows(block, filled)
            self._first += len(filled)
            self._position = position
            if self._saved.is_due(len(filled)):
                self._save()
        if self._saved.has_saved:
            self._save()

    def _save(self) -> None:
        state = {
            "n_rows": np.array(self._first),
            "position": np.array(self._position),
            "emptied": np.flatnonzero(self._cells.reason == _EMPTIED),
        }
        self._saved.save(_PACKED, state, self.packed.streams)


def _nothing_left(cells: MeasuredCells, keep_gene: np.ndarray, options: Preprocess) -> str:
    tally = cells.tally()
    n = len(cells.reason) - tally.pop("filter")
    kept = int((cells.reason < 0).sum())
    if kept:
        return (
            f"none of {len(keep_gene):,} genes is left after QC: none is detected in {options.min_cells} of the "
            f"{kept:,} cells that pass; lower preprocess.min_cells"
        )
    if tally["no counts"] == n:
        return f"none of {n:,} cells is left after QC: none has a count"
    limits = {name: f" {getattr(options, name):g}" for name in QUALITY}
    parts = []
    for name, count in tally.items():
        if count:
            parts.append(f"{name}{limits.get(name, '')} drops {count:,}")
    option, change = strictest(tally)
    advice = describe_sparse(cells.measures["n_counts"]) or f"{change} preprocess.{option}"
    return f"none of {n:,} cells is left after QC: {', '.join(parts)}; {advice}"


def describe_sparse(n_counts: np.ndarray) -> str | None:
    """Advice on rows that hold too few counts for cells; None if they hold enough, or are few."""
    if len(n_counts) < _MIN_ROWS or np.median(n_counts) > _MAX_SPARSE_COUNTS:
        return None
    median = int(np.median(n_counts))
    return (
        f"half of the rows have at most {median} counts, as empty droplets or 2 um bins of Visium HD: use the filtered "
        "matrix, or bins of 8 or 16 um"
    )


def strictest(dropped: Mapping[str, int]) -> tuple[str, str]:
    """Find the option of quality control that drops most cells.

    Also returns whether to lower or raise it to keep them.
    """
    option = max(QUALITY, key=lambda name: dropped.get(name, 0))
    return option, "raise" if option == "max_mito_frac" else "lower"


def _report(
    reader: CountsReader,
    options: Preprocess,
    genes: Genes,
    cells: MeasuredCells,
    keep_gene: np.ndarray,
) -> dict[str, Any]:
    unfiltered = cells.reason != DROPPED.index("filter")
    measures = {name: values[unfiltered] for name, values in cells.measures.items()}
    kept = cells.reason[unfiltered] < 0
    coverage = genes.coverage
    lost = cells.unnamed_sums
    lost_rows = genes.unnamed[np.argsort(-lost, kind="stable")][:LOST_NAMES]
    dropped_genes = {
        "not gene expression": reader.n_vars - len(genes.rows),
        "no Ensembl id": coverage.ambiguous + coverage.unmapped,
    }
    if coverage.reference is not None:
        dropped_genes["no ortholog"] = coverage.n_with_id - coverage.orthologs
    notes = [*describe_changes(coverage), *describe_sums(genes.summed)]
    if options.max_mito_frac < 1 and not genes.is_mito.any():
        why = "no symbol begins with MT-, mt: or MT."
        remedy = "rename these genes, or set"
        if genes.n_mito_names:
            why = f"none of {genes.n_mito_names:,} mitochondrial names is a gene with an Ensembl id"
            why += "" if coverage.reference is None else " and an ortholog"
            remedy = "set"
        notes.append(
            f"warning: {why}, so no gene counts as mitochondrial and max_mito_frac drops no cell; {remedy} "
            "max_mito_frac to 1"
        )
    n_summed = int((genes.target >= 0).sum()) - len(genes.gene_ids)
    dropped_genes |= {"summed into another": n_summed, "min_cells": int((~keep_gene).sum())}
    return {
        "cells": {"in": reader.n_obs, "out": int(kept.sum()), "dropped": cells.tally()},
        "genes": {"in": reader.n_vars, "out": int(keep_gene.sum()), "dropped": dropped_genes},
        "coverage": {
            **coverage.as_json(),
            "summed": dict(islice(genes.summed.items(), 10)),
            "counts_frac": 1 - float(lost.sum()) / max(cells.total, 1),
            "lost_names": [genes.names[row] for row in lost_rows],
            "notes": notes,
        },
        "nnz": int(cells.detected[keep_gene].sum()),
        "dtype": count_dtype(cells.largest).name,
        "sparse": describe_sparse(measures["n_counts"]),
        **distributions(options, measures, kept),
    }


def distributions(
    options: Preprocess, measures: dict[str, np.ndarray], kept: np.ndarray
) -> dict[str, Any]:
    """Make the entries of a QC report on measures of cells: quantiles, histograms, and the options.

    Quantiles and histograms are of the cells before and after QC. Bins are equal on a log scale, whose
    first bin includes zeros; for `mito_frac`, on a linear scale.
    """
    quantiles = {}
    histograms = {}
    for name, values in measures.items():
        quantiles[name] = {
            "before": np.quantile(values, QUANTILES).tolist(),
            "after": np.quantile(values[kept], QUANTILES).tolist(),
        }
        if name == "mito_frac":
            edges = np.linspace(0, max(float(values.max()), 0.05), BINS + 1)
        else:
            edges = np.geomspace(1, max(float(values.max()), 2.0), BINS + 1)
            values = np.maximum(values, 1)
        # rounding may have moved the last edge below the maximum
        edges[-1] = max(edges[-1], float(values.max()))
        histograms[name] = {
            "edges": edges.tolist(),
            "before": np.histogram(values, edges)[0].tolist(),
            "after": np.histogram(values[kept], edges)[0].tolist(),
        }
    return {
        "quantiles": quantiles | {"at": list(QUANTILES)},
        "histograms": histograms,
        "options": options.model_dump(mode="json"),
    }


def preprocess_sequences(
    reader: CountsReader, options: Preprocess, out: Path, columns: ObsColumns = NO_COLUMNS
) -> dict[str, Any]:
    """Write the sequences of `reader` that are kept to `out`; return the report, as on cells.

    Raises DataError when a column of `keep_obs` or `columns` is missing, or nothing is left.
    """
    chosen = choose_obs(reader, options.keep_obs, columns)
    lengths, reason = _measure_sequences(reader, options, chosen.keep)
    kept = reason < 0
    names = RANKED_DROPPED if reader.ranked else SEQUENCES_DROPPED
    dropped = {name: int((reason == number).sum()) for number, name in enumerate(names)}
    if not kept.any():
        what = "cells" if reader.ranked else "sequences"
        raise DataError(
            f"{reader.path}: none of {reader.n_obs:,} {what} is left: {dropped}; lower {names[2]}"
        )

    def read_kept() -> Iterator[sp.csr_matrix]:
        first = 0
        for block in reader.rows(options.row_block):
            yield block[np.flatnonzero(kept[first : first + block.shape[0]])]
            first += block.shape[0]

    nnz = int(lengths[kept].sum())
    dtype = count_dtype(1)
    write_packed(
        out,
        chosen.kept(kept),
        reader.var,
        read_kept(),
        "rank",
        dtype,
        ordered=True,
        ranked=reader.ranked,
    )
    n = reader.n_vars
    measure = "n_genes" if reader.ranked else "n_residues"
    report = {
        "cells": {"in": reader.n_obs, "out": int(kept.sum()), "dropped": dropped},
        "genes": {"in": n, "out": n, "dropped": {}},
        "coverage": {"frac": 1.0, "n_genes": n},
        "nnz": nnz,
        "dtype": dtype.name,
    }
    report |= distributions(options, {measure: lengths}, kept)
    return report | chosen.report(kept, lengths)


def _measure_sequences(
    reader: CountsReader, options: Preprocess, keep: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Length of each sequence, and why it is dropped: index into SEQUENCES_DROPPED, or -1."""
    lengths = list[int]()
    reasons = list[int]()
    seen = set[bytes]()
    min_length = options.min_genes if reader.ranked else options.min_counts
    unit = "cells" if reader.ranked else "sequences"
    label = f"preprocess {reader.path.stem}"
    for block in progress(reader.rows(options.row_block), label, reader.n_obs, unit):
        for start, stop in pairwise(block.indptr.tolist()):
            # 16 bytes a sequence: a collision among a billion has a probability of 10^-21
            text = block.indices[start:stop].astype("<i4").tobytes()
            key = hashlib.blake2b(text, digest_size=16).digest()
            checks = (not keep[len(reasons)], start == stop, stop - start < min_length, key in seen)
            lengths.append(stop - start)
            reasons.append(checks.index(True) if any(checks) else -1)
            if not any(checks):
                seen.add(key)
    return np.array(lengths, np.int64), np.array(reasons, np.int8)
