"""Predicted expression of genes that a file lacks, by a model's decoder and, in an export that has
one, its ridge regression.

Values are those that task `imputation` scores if the same genes are hidden: log(1 + counts per
10,000), where 10,000 is the sum over the measured and the predicted genes. So they depend a little
on which genes are predicted together. Cells are read in blocks.

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

ABOUT_IMPUTATION = "cellmill_imputation"  # uns


class FileImputer:
    """Prediction of genes that one file lacks: `blocks`, then `describe`.

    Attributes: `genes`, (G,) int64, rows of the vocabulary in ascending order; `about`, content of
    uns; `shape`, (C, G).
    """

    def __init__(
        self,
        reader: CountsReader,
        model: InferenceModel,
        folder: Path,
        names: Sequence[str] | None,
        section: Embed,
    ) -> None:
        """`model` is the one in `folder`. `names` are ids or symbols of genes, None for all that the
        file lacks.

        Raises ConfigError for a model that predicts no expression, or an unknown gene; DataError
        for a file without counts, or one that has all these genes.
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
        self._coverage: FileCoverage | None = None
        measured = self._columns.known_genes
        named = _rows_of_genes(names, self._vocabulary)
        self.genes = np.setdiff1d(named, measured)
        self.shape = reader.n_obs, len(self.genes)
        if not len(self.genes):
            which = "all of the model's genes, none is left to predict"
            if names is not None:
                which = f"all {len(named):,} named genes; name some that it lacks"
            raise DataError(f"{reader.path}: it measures {which}")
        self.about = self._make_about(config, measured)
        if names is not None:
            self.about["named_and_measured"] = self._ids(np.intersect1d(named, measured))

    def _make_about(self, config: dict[str, Any], measured: np.ndarray) -> dict[str, Any]:
        """Entries of uns: the model, whose config.json is `config`, its regression, and the genes that
        the file has, `measured` rows of the vocabulary.
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
        """Expression of the cells in their order, (cells of a block, G) float32; NaN for a cell
        without a gene of the model.

        Raises DataError as `embed_cells`, after the last block.
        """
        reader = self._reader
        column_counts = ColumnCounts(reader.n_vars)
        rows = progress(reader.rows(ROW_BLOCK), f"impute {reader.path.stem}", reader.n_obs)
        tallied = column_counts.tally(rows, np.ones(reader.n_obs, bool))
        block_starts = range(ROW_BLOCK, reader.n_obs, ROW_BLOCK)
        levels = np.split(read_levels(reader, self._network), block_starts)
        has_genes = []
        for counts, levels_of_block in zip(tallied, levels):
            values, is_known = self._predict(counts, levels_of_block)
            has_genes.append(is_known)
            yield values
        self._coverage = measure_coverage(
            reader,
            self._columns,
            self._model,
            self._section,
            column_counts,
            np.concatenate(has_genes),
        )

    def _predict(self, counts: sp.csr_matrix, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cells, G) float32: expression of cells with these counts and levels of obs columns; and
        whether each has a gene of the model, bool (cells,).
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
        )
        values = decode_expression(cells, cells.embed(self._network))
        assert values is not None, "expected a model with a decoder"
        if self._ridge is not None:
            (by_ridge,) = cells.predict_by_ridge(self._ridge)
            values = self._ridge.mix(values, by_ridge)
        is_known = cells.visible_counts.getnnz(axis=1) > 0
        values[~is_known] = np.nan
        return values, is_known

    def describe(self) -> ad.AnnData:
        """obs, var and uns of the result, without X; after all `blocks`."""
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

    def limits(self, described: ad.AnnData) -> list[str]:
        """Lines on what limits the use of the values; `described` is the result of `describe`."""
        assert self._coverage is not None
        about = described.uns[ABOUT_IMPUTATION]
        lines = describe_limits(self._coverage)
        left = about.get("named_and_measured")
        if left:
            lines.append(
                f"{len(left):,} of the named genes are measured in it and not predicted: {list_first(left, MAX_NAMES)}"
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
    """Rows of the vocabulary, ascending, of the named genes; of all for None. Raises ConfigError for
    an unknown name.
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
