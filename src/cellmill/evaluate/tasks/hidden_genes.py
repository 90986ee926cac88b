"""Cells with genes that are hidden from the model, and the model's prediction of these genes.

A hidden gene is treated as one that was not measured: its counts are removed before anything is
computed from a cell, and a model whose tokens include zeros (`tokens.zero_frac`) does not see it as
a zero.

Legend: C cells, F columns of the file, V genes of the vocabulary, G hidden genes, H hidden width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.arrays import TARGET_SUM, log_normalise, select_columns
from cellmill.data.genes.names import GeneColumns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.micro_batches import split_batch
from cellmill.evaluate.features.cell_features import TOKEN_BUDGET, keep_columns
from cellmill.evaluate.inference.embed import embed_batches, inference, tokenize_blocks
from cellmill.evaluate.inference.ridge import GeneRidge
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.expression import expected_log_expression
from cellmill.models.batch import PAD_TOKEN, add_tokens, to_tensors
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.masked_value import MaskedValue
from cellmill.models.objectives.query_decoding import QueryDecoding
from cellmill.models.objectives.shared.masking import MaskedBatch
from cellmill.parallel.vocab_parallel import token_logits

DECODED_CELLS = 256  # cells whose profiles are decoded at once
QUERIED_CELLS = 32  # cells that are queried at once
# hidden genes that masked_value predicts in one pass: about the share of a cell that training masks
MASKED_GENES = 64
MASKED_TOKENS = 16_384  # tokens of such a pass, without those of hidden genes


@dataclass(frozen=True)
class HiddenGenes:
    """Counts of some cells, and the genes that are hidden in all of them from a model."""

    network: Any  # the model; which parts it has depends on its family and objective
    vocabulary: Vocabulary
    token_options: Tokens
    precision: str
    gene_columns: GeneColumns  # columns of `counts` as rows of the vocabulary
    counts: sp.csr_matrix  # (C, F)
    genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending

    @classmethod
    def in_context(
        cls,
        context: Context,
        counts: sp.csr_matrix,
        genes: np.ndarray,
        gene_columns: GeneColumns | None = None,
    ) -> Self:
        """Hide `genes` from the evaluated model; `gene_columns`: by default the dataset's."""
        model = context.model
        columns = gene_columns or context.gene_columns
        precision = context.options.precision
        return cls(model.network, model.vocabulary, model.tokens, precision, columns, counts, genes)

    @cached_property
    def measured_genes(self) -> np.ndarray:
        """(M,) int64: rows of the genes that have a column or are hidden, ascending."""
        target = self.gene_columns.target
        return np.union1d(target[target >= 0], self.genes)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.network.parameters()).device

    @cached_property
    def visible(self) -> sp.csr_matrix:
        """(C, F): the counts without those of hidden genes."""
        is_hidden = np.isin(self.gene_columns.target, self.genes)
        return keep_columns(self.counts, ~is_hidden)

    @cached_property
    def profiles(self) -> sp.csr_matrix:
        """(C, V) float32: log(1 + counts per 10,000) of the visible genes that the model knows."""
        return log_normalise(self.to_vocabulary(self.visible))

    def expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, where 10,000 is the sum
        over all genes that the model knows.
        """
        profiles = log_normalise(self.to_vocabulary(self.counts))
        return np.asarray(profiles[:, self.genes].toarray())

    def tokens(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        for batch in tokenize_blocks(
            [self.visible], self.gene_columns, self.vocabulary, self.token_options
        ):
            # removed counts are zeros, which may have tokens too
            is_visible = ~np.isin(batch.token_ids, self.genes + len(SPECIAL))
            yield _keep_tokens(batch, is_visible)

    def embed(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for a cell without any."""
        n_cells = self.counts.shape[0]
        vectors = embed_batches(self.tokens(), network, n_cells, TOKEN_BUDGET, self.precision)
        return np.nan_to_num(vectors)

    def predict_by_ridge(
        self, ridge: GeneRidge, noises: Iterable[float] = (1.0,)
    ) -> list[np.ndarray]:
        """(C, G) float32: expression of the hidden genes, from the visible ones, for each of `noises`,
        in units of the noise of the regression.
        """
        shown = np.setdiff1d(self.measured_genes, self.genes)
        return ridge.predict(self.to_vocabulary(self.visible), shown, self.genes, noises)

    def to_vocabulary(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """(C, V): counts (C, F) by row of the vocabulary."""
        return select_columns(counts, self.gene_columns.target, self.vocabulary.n_genes)


def _keep_tokens(batch: Batch, is_kept: np.ndarray) -> Batch:
    """The batch with these tokens only, and the cells that have any."""
    # (cells + 1,): bounds of each cell among the tokens that are kept
    n_before = np.concatenate([[0], np.cumsum(is_kept)])
    bounds = n_before[batch.cu_seqlens].astype(np.int32)
    has_tokens = np.diff(bounds) > 0
    masks = {"token": is_kept, "cell": has_tokens}
    return batch.map(
        lambda per, array: array[masks[per.axis]],
        cu_seqlens=bounds[np.concatenate([[True], has_tokens])],
    )


def decode_expression(hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray | None:
    """(C, G) float32: log(1 + counts per 10,000) that the model predicts, from vectors (C, H) if
    its objective decodes these.

    None for a model that predicts no expression.
    """
    decoder = find_decoder(hidden.network)
    with inference(hidden.device, hidden.precision):
        if isinstance(decoder, CellDecoding):
            return _decode_profiles(hidden, vectors, decoder)
        if isinstance(decoder, QueryDecoding):
            return _query_genes(hidden, vectors, decoder)
        if isinstance(decoder, MaskedValue):
            return _predict_masked(hidden, decoder)
    return None


def find_decoder(network: Model) -> CellDecoding | QueryDecoding | MaskedValue | None:
    """The objective, or part of a sum, that predicts expression; None without one."""
    objective = network.objective
    for leaf in objective.leaves().values():
        if isinstance(leaf, CellDecoding | QueryDecoding):
            return leaf
    # not a leaf of a sum, because a sum may draw a view of the cell
    if isinstance(objective, MaskedValue) and objective.tokens.value_kind == "scalar":
        return objective
    return None


def _decode_profiles(
    hidden: HiddenGenes, vectors: np.ndarray, objective: CellDecoding
) -> np.ndarray:
    """(C, G) float32: expression from the profile that the decoder predicts for each vector."""
    network = hidden.network
    device = hidden.device
    measured = hidden.measured_genes
    hidden_columns = np.searchsorted(measured, hidden.genes)
    measured_tokens = torch.from_numpy(measured + len(SPECIAL)).to(device)
    visible = hidden.to_vocabulary(hidden.visible)
    blocks = []
    for block_start in range(0, len(vectors), DECODED_CELLS):
        block = slice(block_start, block_start + DECODED_CELLS)
        predicted = network.decoder(torch.from_numpy(vectors[block]).to(device))
        logits = token_logits(predicted, network.profile_genes.weight, network.profile_bias)
        # shares of the measured genes sum to 1
        shares = logits[:, measured_tokens].double().softmax(1)
        expression = expand_shares(
            shares.cpu().numpy()[:, hidden_columns], visible[block], objective.predicts_log_counts
        )
        blocks.append(expression)
    return np.concatenate(blocks).astype(np.float32)


def _query_genes(hidden: HiddenGenes, vectors: np.ndarray, objective: QueryDecoding) -> np.ndarray:
    """(C, G) float32: expression that the decoder predicts for a query of each hidden gene."""
    network = hidden.network
    device = hidden.device
    genes = torch.from_numpy(hidden.genes + len(SPECIAL)).to(device)
    blocks = []
    for block in torch.from_numpy(vectors).split(QUERIED_CELLS):
        # (cells * G,): cell and gene of each query
        n_cells = len(block)
        cell = torch.arange(n_cells, device=device).repeat_interleave(len(genes))
        gene = genes.repeat(n_cells)
        answers = objective.predict_queries(network, block.to(device), cell, gene)
        by_cell = answers.view(n_cells, len(genes))
        blocks.append(by_cell.cpu().numpy())
    return np.maximum(np.concatenate(blocks), 0)


def _predict_masked(hidden: HiddenGenes, objective: MaskedValue) -> np.ndarray:
    """(C, G) float32: expression of masked tokens that are added to the visible tokens."""
    network = hidden.network
    device = hidden.device
    genes = torch.from_numpy(hidden.genes + len(SPECIAL))
    n_cells = hidden.counts.shape[0]
    values = np.zeros((n_cells, len(genes)), np.float32)
    for cells in hidden.tokens():
        for batch in split_batch(cells, MASKED_TOKENS):
            tensors = to_tensors(batch, device)
            for block_start in range(0, len(genes), MASKED_GENES):
                block = slice(block_start, block_start + MASKED_GENES)
                masked = _add_masked(network, tensors, genes[block].to(device))
                states = network.head(network.states(masked)[masked.targets])
                predicted = objective.predict_from_head(network, states, masked).float()
                by_cell = predicted.view(len(batch.cell_ids), -1)
                values[batch.cell_ids, block] = by_cell.cpu().numpy()
    return np.maximum(values, 0)


def expand_shares(shares: np.ndarray, visible: sp.csr_matrix, is_log: bool) -> np.ndarray:
    """(C, G) float64: expected log(1 + counts per 10,000) of hidden genes.

    `shares`, (C, G), are the shares of hidden genes in the cell's counts, which are Poisson counts,
    or if `is_log` in the sum of its log(1 + count). `visible`, (C, V), are counts of the other
    genes, which have the remaining share.
    """
    visible_share = np.maximum(1 - shares.sum(1), 1e-9)
    visible_depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    if is_log:
        # used as shares of log(1 + counts per 10,000): depth enters through the visible genes only
        per_count = TARGET_SUM * visible_share / np.maximum(visible_depth, 1e-9)
        logs = visible.multiply(per_count[:, None]).tocsr().log1p()
        log_sum = np.asarray(logs.sum(axis=1)).ravel()
        return np.asarray(shares * (log_sum / visible_share)[:, None])
    counts = shares * (visible_depth / visible_share)[:, None]
    depth = visible_depth + counts.sum(1)
    shares_of_all = counts / np.maximum(depth, 1e-9)[:, None]
    # the logarithm of an expectation would be far larger
    return expected_log_expression(shares_of_all, depth)


def _add_masked(network: Model, batch: Batch, genes: torch.Tensor) -> MaskedBatch:
    """The cells with tokens of `genes`, which no cell has, after their own tokens; the values of
    the added tokens are hidden.
    """
    n_genes = len(genes)
    extended = add_tokens(batch, 0, n_genes, PAD_TOKEN)
    # positions of the added tokens: the last of each cell
    ends = extended.cu_seqlens[1:, None].long()
    positions = ends - n_genes + torch.arange(n_genes, device=ends.device)
    genes_of_cells = genes.repeat(len(batch.lengths))
    tokens = extended.token_ids.index_copy(0, positions.flatten(), genes_of_cells)
    # the view adds the family's own tokens
    view = network.view(replace(extended, token_ids=tokens), seed=0, step=0)
    is_added = torch.isin(view.token_ids, genes)
    targets = is_added.nonzero().flatten()
    return MaskedBatch.prepared(
        view,
        value_hidden=is_added,
        targets=targets,
        answers=view.values[targets],
        n_targets=torch.tensor(len(targets)),
    )
