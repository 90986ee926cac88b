"""Predicted expression of genes that a file lacks.

The decoder of a model predicts the expression. If the export has a ridge regression, the prediction is
the weighted mean of decoder and regression. Task `imputation` scores equal values if the same genes are
hidden.

The unit is log(1 + counts per 10,000). The 10,000 are the sum over the measured and the predicted genes.
So a value depends a little on which genes are predicted together.

Legend: C cells, G predicted genes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.checks import check_rows
from cellmill.config.run import Embed
from cellmill.config.section import shown
from cellmill.data.genes.names import match_columns, rows_of_known_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.hidden_genes.decoder import decode_expression, find_decoding_objective
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.hidden_genes.ridge import GeneRidge
from cellmill.evaluate.inference.annotations import SEEN
from cellmill.evaluate.inference.embed import (
    ROW_BLOCK,
    ColumnCounts,
    FileCoverage,
    InferenceModel,
    describe_limits,
    measure_coverage,
    read_levels,
)
from cellmill.evaluate.inference.label_counts import MAX_NAMES
from cellmill.evaluate.seen.seen_cells import mark_seen_cells
from cellmill.files import progress

ABOUT_IMPUTATION = "cellmill_imputation"  # key of uns


class FileImputer:
    """Predicts the genes that one file lacks.

    Read all of `blocks`, then call `describe`, then `describe_limits`.

    Attributes: `genes`, (G,) int64, has the rows of the predicted genes in the vocabulary, ascending.
    `about` is the content of uns. `shape` is (C, G).
    """

    def __init__(
        self,
        reader: CountsReader,
        model: InferenceModel,
        folder: Path,
        names: Sequence[str] | None,
        section: Embed,
    ) -> None:
        """`model` was read from `folder`. `names` are ids or symbols of the genes to predict; None
        stands for all genes of the model that the file lacks.

        Raises ConfigError if the model predicts no expression, or if it does not know a named gene.
        Raises DataError if the file has no counts, or if the file has all of these genes.
        """
        self._model = model
        self._network, self._vocabulary, self._tokens, config = model
        if find_decoding_objective(self._network) is None:
            raise ConfigError(
                f"{folder}: it predicts no expression; export a run with objective cell_decoding, query_decoding, or "
                "masked_value with tokens.tokenizer continuous"
            )
        check_rows(self._tokens, reader, str(reader.path))
        self._columns = match_columns(reader, self._vocabulary)
        if self._columns.ordered:
            raise DataError(
                f"{reader.path}: its genes are ordered and have no counts; impute predicts expression from counts"
            )
        self._reader = reader
        self._folder = folder
        self._section = section
        self._ridge = GeneRidge.read(folder, config)
        self._coverage: FileCoverage | None = None  # known after the last block

        # the genes to predict: the named genes that the file lacks
        measured = self._columns.known_genes
        named = _rows_of_genes(names, self._vocabulary)
        self.genes = np.setdiff1d(named, measured)
        self.shape = reader.n_obs, len(self.genes)
        if not len(self.genes):
            measured_genes = "all of the model's genes: none is left to predict"
            if names is not None:
                measured_genes = f"all {len(named):,} named genes; name some that it lacks"
            raise DataError(f"{reader.path}: it measures {measured_genes}")
        self.about = self._make_about(config, measured)
        if names is not None:
            self.about["named_and_measured"] = self._ids(np.intersect1d(named, measured))

    def _make_about(self, config: dict[str, Any], measured: np.ndarray) -> dict[str, Any]:
        """Entries of uns about the model, its regression and the genes that the file measures.

        `config` is the content of config.json. `measured` are rows of the vocabulary.
        """
        about = {
            "model_digest": config["weights_sha256"],
            "vocabulary_digest": self._vocabulary.digest,
            "method": "decoder" if self._ridge is None else "decoder + ridge",
            "unit": "log(1 + counts per 10,000 of the measured and the predicted genes)",
            "measured_genes": self._ids(measured),
        }
        if self._ridge is not None:
            about["decoder_weight"] = float(self._ridge.decoder_weight[0])
            if self._ridge.validation_correlation is not None:
                about["validation_correlation"] = self._ridge.validation_correlation
        return about

    def _ids(self, genes: np.ndarray) -> list[str]:
        return [self._vocabulary.gene_ids[gene] for gene in genes]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the predicted expression of each block of cells, (cells of the block, G) float32.

        Cells are in the order of the file. A cell without counts of the model's genes has NaN. After
        the last block, raises DataError if the model knows too few of the file's counts, or if the
        file has too few of the model's genes.
        """
        reader = self._reader
        column_counts = ColumnCounts(reader.n_vars)
        rows = progress(reader.rows(ROW_BLOCK), f"impute {reader.path.stem}", reader.n_obs)
        tallied = column_counts.tally(rows, np.ones(reader.n_obs, bool))
        # the levels of the cells, divided into the same blocks as the counts
        block_starts = range(ROW_BLOCK, reader.n_obs, ROW_BLOCK)
        levels = np.split(read_levels(reader, self._network), block_starts)
        has_genes_of_blocks = []
        for counts, levels_of_block in zip(tallied, levels):
            values, has_genes = self._predict(counts, levels_of_block)
            has_genes_of_blocks.append(has_genes)
            yield values
        self._coverage = measure_coverage(
            reader,
            self._columns,
            self._model,
            self._section,
            column_counts,
            np.concatenate(has_genes_of_blocks),
        )

    def _predict(self, counts: sp.csr_matrix, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict the expression of some cells from their `counts` and `levels` of obs columns.

        Returns the expression, (cells, G) float32, and `has_genes`, (cells,) bool. `has_genes` is True
        for cells with counts of the model's genes; other cells have NaN.
        """
        cells = PartlyHiddenCells(
            self._network,
            self._vocabulary,
            self._tokens,
            self._section.precision,
            self._columns,
            counts,
            self.genes,
            levels,
            self._section.token_budget,
        )
        values = decode_expression(cells, cells.embed(self._network))
        assert values is not None, "expected a model with a decoder"
        if self._ridge is not None:
            (by_ridge,) = cells.predict_by_ridge(self._ridge)
            values = self._ridge.mix(values, by_ridge)
        has_genes = cells.visible_counts.getnnz(axis=1) > 0
        values[~has_genes] = np.nan
        return values, has_genes

    def describe(self) -> ad.AnnData:
        """Return obs, var and uns of the result, without X. All `blocks` must have been read."""
        assert self._coverage is not None, "expected all blocks to be read"
        obs = self._reader.obs
        seen = mark_seen_cells(self._reader, self._folder)
        about = self.about | {"n_without_genes": self._coverage.n_without_genes}
        if seen.is_seen is not None:
            obs = obs.assign(**{SEEN: seen.is_seen})
            about["n_seen_in_training"] = int(seen.is_seen.sum())
        if seen.caveat:
            about["training_cells_unknown"] = seen.caveat
        columns = {
            "symbol": [self._vocabulary.symbols[gene] for gene in self.genes],
            # cells of the model's corpus that express the gene
            "n_corpus_cells": self._vocabulary.n_cells[self.genes],
        }
        var = pd.DataFrame(columns, index=self._ids(self.genes))
        return ad.AnnData(obs=obs, var=var, uns={ABOUT_IMPUTATION: about})

    def describe_limits(self, described: ad.AnnData) -> list[str]:
        """Sentences on what limits the use of the values; `described` is the result of `describe`."""
        assert self._coverage is not None
        about = described.uns[ABOUT_IMPUTATION]
        lines = describe_limits(self._coverage, "predicted values are less certain")
        already_measured = about.get("named_and_measured")
        if already_measured:
            lines.append(
                f"{len(already_measured):,} of the named genes are measured in it and not predicted: "
                f"{list_first(already_measured, MAX_NAMES)}"
            )
        if about.get("decoder_weight") == 0:
            lines.append(
                "warning: validation cells gave the decoder no weight: values are those of the ridge regression"
            )
        n_seen = about.get("n_seen_in_training")
        if n_seen:
            lines.append(f"{n_seen:,} cells come from the model's training or validation cells")
        if "training_cells_unknown" in about:
            lines.append(about["training_cells_unknown"])
        return lines


def _rows_of_genes(names: Sequence[str] | None, vocabulary: Vocabulary) -> np.ndarray:
    """Rows of the named genes in the vocabulary, ascending int64. None stands for all genes.

    Raises ConfigError for an unknown name.
    """
    if names is None:
        return np.arange(vocabulary.n_genes)
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ConfigError("genes: expected names, got none")
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"genes: expected names, got {shown(name)}")
    rows = rows_of_known_genes(names, vocabulary, "genes")
    return np.unique([*rows.values()]).astype(np.int64)
