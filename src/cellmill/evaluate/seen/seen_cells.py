"""Cells of a file that a model was trained on.

A training cell is recognised by its counts of the vocabulary's genes, under any name. If the model has a
digest list, a training cell that was sequenced to another depth is recognised by its barcode. If the
model has neither shards nor digests, a message says that its training cells are not known.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.genes.names import match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.shards.cell_digests import BARCODE, MIN_SAMPLE_BARCODES, CorpusDigests
from cellmill.errors import DataError
from cellmill.evaluate.seen.copies import find_barcodes, find_equal_cells
from cellmill.evaluate.seen.corpus_hashes import (
    MAX_COMPLETED_COUNT,
    MAX_COMPLETIONS,
    HashedCorpus,
)
from cellmill.evaluate.seen.training_cells import KnownTrainingCells, find_training_cells

KINDS = ["exact", "near", "new"]
"""Kinds of a cell. An exact cell has the counts of a training cell, over the genes of the model. A near
cell has the barcode of a training cell, with other counts. A new cell has neither.
"""


class Seen(NamedTuple):
    """Cells of a file that a model, or an ancestor of the model, has seen in training or validation."""

    is_seen: np.ndarray | None  # (n_obs,) bool; None if the training cells are not known
    caveat: (
        str  # sentence on training cells that are not known or not found; empty if there are none
    )
    # (n_obs,) bool: True for cells that were found by barcode only; None without a list of barcodes
    is_near: np.ndarray | None = None


def mark_seen_cells(reader: CountsReader, model: Path) -> Seen:
    """Mark the cells of `reader` that the exported model in the folder `model` has seen.

    Cells that an ancestor of the model has seen are marked too. Raises DataError for a damaged digest
    list.
    """
    training = find_training_cells(model)
    return _mark_cells(reader, training, training.read_corpora())


def tabulate_seen_cells(
    reader: CountsReader, model: Path, vocabulary: Vocabulary
) -> tuple[pd.DataFrame, list[str]]:
    """Tabulate which cells of `reader` the exported model in the folder `model` has seen.

    Returns a table by cell name with the column `seen`, which is one of KINDS. Also returns sentences on
    training cells that are not known, or that would not be found. Raises DataError if `reader` has no gene
    of the model, or if the training cells of the model are not known.
    """
    columns = match_columns(reader, vocabulary)
    training = find_training_cells(model)
    corpora = training.read_corpora()
    seen = _mark_cells(reader, training, corpora)
    if seen.is_seen is None:
        raise DataError(
            f"{model}: it may have seen these cells, because its training cells are not known "
            f"({seen.caveat}); export it again, with consolidate.cell_digests"
        )
    is_near = np.zeros(reader.n_obs, bool) if seen.is_near is None else seen.is_near
    kinds = np.where(is_near, "near", np.where(seen.is_seen, "exact", "new"))
    table = pd.DataFrame(
        {"seen": pd.Categorical(kinds, KINDS)},
        index=pd.Index(reader.obs_names, name="cell"),
    )
    notes = _describe_limits(reader, corpora, seen)
    if columns.mismatch:
        notes.append(columns.mismatch)
    return table, notes


def _describe_limits(
    reader: CountsReader, corpora: Sequence[HashedCorpus], seen: Seen
) -> list[str]:
    """Return sentences on training cells that are not known, or that would not be found."""
    notes = [seen.caveat] if seen.caveat else []
    unfindable = _describe_lacked_genes(reader, corpora)
    if not any(line in seen.caveat for line in unfindable):
        notes += [f"{line} is found by its barcode only" for line in unfindable]
    if seen.is_near is None:
        notes.append("near copies are not found: the model has no list of barcodes")
    elif not _has_barcodes(reader):
        notes.append(
            f"near copies may be missed: fewer than {MIN_SAMPLE_BARCODES} names of the file's cells have "
            "barcodes"
        )
    return notes


def _mark_cells(
    reader: CountsReader, training: KnownTrainingCells, corpora: Sequence[HashedCorpus]
) -> Seen:
    """Mark the cells of `reader` that are among the cells of `training`, which has these `corpora`."""
    if training.missing_reason:
        return Seen(None, training.missing_reason)
    caveats = []
    if training.missing_ancestors:
        names = ", ".join(training.missing_ancestors)
        caveats.append(f"the training cells of {names}, before this model, are not known")
    is_equal = find_equal_cells(reader, corpora, np.ones(reader.n_obs, bool))
    if not training.listed:
        return Seen(is_equal, "; ".join(caveats))
    listed = training.listed.values()
    caveats += describe_unfindable_cells(reader, corpora, listed)
    is_near = find_barcodes(reader, listed) & ~is_equal
    return Seen(is_equal | is_near, "; ".join(caveats), is_near)


def describe_unfindable_cells(
    reader: CountsReader, corpora: Sequence[HashedCorpus], listed: Collection[CorpusDigests]
) -> list[str]:
    """Say which training cells neither counts nor barcodes find: a sentence, or none if all are found.

    `listed` are the digest lists among the corpora, which have barcodes.
    """
    if _has_barcodes(reader) and all(len(corpus.barcodes) for corpus in listed):
        return []
    return [f"{line} may be missed" for line in _describe_lacked_genes(reader, corpora)]


def _has_barcodes(reader: CountsReader) -> bool:
    """True if enough cell names have a barcode. Fewer barcodes may be shared by chance."""
    return reader.obs_names.str.contains(BARCODE).sum() >= MIN_SAMPLE_BARCODES


def _describe_lacked_genes(reader: CountsReader, corpora: Sequence[HashedCorpus]) -> list[str]:
    """Begin a sentence on training cells that are not found by their counts; the caller ends it.

    Such cells exist if the file lacks genes of a corpus without shards. Otherwise the list is empty. The
    sentence is about the corpus of which the file lacks most genes.
    """
    n_lacked = 0
    n_genes = 0
    for corpus in corpora:
        if corpus.manifest is not None or reader.ordered:
            # With shards, cells are hashed again over the shared genes. In a file of ordered genes, a
            # copied sequence has all its tokens.
            continue
        with suppress(DataError):  # the file shares no gene with this corpus, so no cell is equal
            target = match_columns(reader, corpus.genes).target
            n = corpus.genes.n_genes - len(np.unique(target[target >= 0]))
            if n > n_lacked:
                n_lacked = n
                n_genes = corpus.genes.n_genes
    if not n_lacked:
        return []
    n_counts = min(MAX_COMPLETED_COUNT, MAX_COMPLETIONS // n_lacked)
    kind = f"more than one of them, or above {n_counts} counts of one," if n_counts else "any"
    return [
        f"the file lacks {n_lacked:,} of the {n_genes:,} genes of a training corpus: a training cell with {kind}"
    ]
