"""Genes that are hidden in all cells of a dataset, and their expression as the model predicts it.

A hidden gene is treated as one that was not measured: its counts are removed before anything is
computed from a cell, and a model whose tokens include zeros (`tokens.zero_frac`) does not see it as
a zero.

Legend: C cells, F columns of the file, V genes of the vocabulary, G hidden genes, H hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import TARGET_SUM, log_normalise, select_columns
from cellmill.data.genes.names import GeneColumns
from cellmill.data.stream.batch import Batch, split_batch
from cellmill.evaluate.features import embed_counts, keep_columns
from cellmill.evaluate.inference.embed import inference, tokens_of
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.changes import expected_log_expression
from cellmill.models.batch import PAD_TOKEN, add_tokens, to_tensors
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.masked import MaskedBatch, MaskedValue
from cellmill.models.objectives.query_decoding import QueryDecoding
from cellmill.parallel.vocab_parallel import token_logits

# cells decoded at once, by a profile or by queries
CELLS = 256
QUERIED_CELLS = 32
# hidden genes that masked_value predicts in one pass: about the share of a cell that training masks
WANTED = 64
WANTED_TOKENS = 16_384  # tokens of such a pass, without the wanted ones


@dataclass(frozen=True)
class HiddenGenes:
    """Counts of some cells, and the genes that are hidden in all of them."""

    context: Context
    counts: sp.csr_matrix  # (C, F)
    genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending
    # genes of the columns of `counts`; None: they are the dataset's
    known: GeneColumns | None = None

    @property
    def columns(self) -> GeneColumns:
        return self.context.columns if self.known is None else self.known

    @property
    def network(self) -> Any:
        return self.context.model.network

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def token_ids(self) -> torch.Tensor:
        """(G,) int64, on the CPU."""
        return torch.from_numpy(self.genes + len(SPECIAL))

    @cached_property
    def visible(self) -> sp.csr_matrix:
        """(C, F): the counts without those of hidden genes."""
        return keep_columns(self.counts, ~np.isin(self.columns.target, self.genes))

    @cached_property
    def profiles(self) -> sp.csr_matrix:
        """(C, V) float32: log(1 + counts per 10,000) of the visible genes that the model knows."""
        return log_normalise(self.of_vocabulary(self.visible))

    def expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, of all counts of the
        model's genes.
        """
        profiles = log_normalise(self.of_vocabulary(self.counts))
        return np.asarray(profiles[:, self.genes].toarray())

    def tokens(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        model = self.context.model
        for batch in tokens_of([self.visible], self.columns, model.vocabulary, model.tokens):
            # a model that reads zeros has tokens of hidden genes
            is_hidden = np.isin(batch.genes, self.genes + len(SPECIAL))
            yield _keep(batch, ~is_hidden)

    def embedded(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for one without any."""
        return embed_counts(self.context, self.counts, network, self.tokens())

    def of_vocabulary(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """(C, V): counts of the columns of the file, by row of the vocabulary."""
        n_genes = self.context.model.vocabulary.n_genes
        return select_columns(counts, self.columns.target, n_genes)


def _keep(batch: Batch, kept: np.ndarray) -> Batch:
    """Tokens of mask `kept`, and the cells that have any."""
    n_kept_before = np.concatenate([[0], np.cumsum(kept)])
    ends = n_kept_before[batch.cu_seqlens].astype(np.int32)
    has_tokens = np.diff(ends) > 0
    chosen = {"token": kept, "cell": has_tokens}
    cu_seqlens = ends[np.concatenate([[True], has_tokens])]
    return batch.map(lambda per, array: array[chosen[per.axis]], cu_seqlens=cu_seqlens)


def decode_expression(hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray | None:
    """(C, G) float32: log(1 + counts per 10,000) that the model predicts from vectors (C, H); None
    for a model that predicts none.
    """
    objective = hidden.network.objective
    with inference(hidden.device, hidden.context.options.precision):
        for part in objective.leaves().values():
            if isinstance(part, CellDecoding):
                return _decode_profiles(part, hidden, vectors)
            if isinstance(part, QueryDecoding):
                return _decode_queries(part, hidden, vectors)
        # not a part of a sum, which may draw a view
        if isinstance(objective, MaskedValue) and objective.tokens.value_kind == "scalar":
            return _predict_masked(objective, hidden)
    return None


def _decode_profiles(part: CellDecoding, hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray:
    network = hidden.network
    device = hidden.device
    visible = hidden.of_vocabulary(hidden.visible)
    measured = hidden.context.measured_genes
    columns = np.searchsorted(measured, hidden.genes)
    measured_tokens = torch.from_numpy(measured + len(SPECIAL)).to(device)
    blocks = []
    for first in range(0, len(vectors), CELLS):
        cells = slice(first, first + CELLS)
        block = torch.from_numpy(vectors[cells]).to(device)
        profiles = network.decoder(block)
        logits = token_logits(profiles, network.profile_genes.weight, network.profile_bias)
        # shares among the measured genes, then of the hidden ones
        shares = logits[:, measured_tokens].double().softmax(1).cpu().numpy()
        expression = expression_of_shares(
            shares[:, columns], visible[cells], part.predicts_log_counts
        )
        blocks.append(expression)
    return np.concatenate(blocks).astype(np.float32)


def _decode_queries(part: QueryDecoding, hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray:
    device = hidden.device
    genes = hidden.token_ids.to(device)
    blocks = []
    for block in torch.from_numpy(vectors).split(QUERIED_CELLS):
        n = len(block)
        cell = torch.arange(n, device=device).repeat_interleave(len(genes))
        queries = genes.repeat(n)
        answers = part.predict_queries(hidden.network, block.to(device), cell, queries)
        by_cell = answers.view(n, len(genes))
        blocks.append(by_cell.cpu().numpy())
    return np.maximum(np.concatenate(blocks), 0)


def _predict_masked(objective: MaskedValue, hidden: HiddenGenes) -> np.ndarray:
    network = hidden.network
    device = hidden.device
    tokens = hidden.token_ids
    values = np.zeros((hidden.counts.shape[0], len(tokens)), np.float32)
    for block in hidden.tokens():
        for batch in split_batch(block, WANTED_TOKENS):
            tensors = to_tensors(batch, device)
            for first in range(0, len(tokens), WANTED):
                wanted = tokens[first : first + WANTED].to(device)
                prepared = _with_masked(network, tensors, wanted)
                states = network.states(prepared)
                states = network.head(states[prepared.targets])
                predicted = objective.predict(network, states, prepared).float()
                by_cell = predicted.view(len(batch.cells), len(wanted))
                values[batch.cells, first : first + WANTED] = by_cell.cpu().numpy()
    return np.maximum(values, 0)


def expression_of_shares(shares: np.ndarray, visible: sp.csr_matrix, is_log: bool) -> np.ndarray:
    """(C, G) float64: expected log(1 + counts per 10,000) of hidden genes, of Poisson counts.

    `shares`, (C, G), are their shares in the cell's counts, or if `is_log` in the sum of its log(1
    + count); `visible`, (C, V), are counts of the other genes, which have the rest. The logarithm
    of an expectation would be far larger.
    """
    rest = np.maximum(1 - shares.sum(1), 1e-9)
    counts_seen = visible.astype(np.float64)
    depth = np.asarray(counts_seen.sum(axis=1)).ravel()
    if is_log:
        logs_seen = counts_seen.log1p()
        log_depth = np.asarray(logs_seen.sum(axis=1)).ravel()
        # the mean of counts whose expected logarithm is known; with this depth, counts per 10,000
        # are counts
        means = np.concatenate([[0.0], np.logspace(-6, 6, 1200)])
        logs = expected_log_expression(means[None] / TARGET_SUM, np.full(1, TARGET_SUM))[0]
        log_sums = log_depth / rest
        counts = np.interp(shares * log_sums[:, None], logs, means)
    else:
        sums = depth / rest
        counts = shares * sums[:, None]
    total = depth + counts.sum(1)
    shares_of_total = counts / np.maximum(total, 1e-9)[:, None]
    return expected_log_expression(shares_of_total, total)


def _with_masked(network: Model, batch: Batch, wanted: torch.Tensor) -> MaskedBatch:
    """The cells with the genes `wanted`, token ids that no cell has, after their own tokens; the
    values of these genes are hidden.
    """
    more = add_tokens(batch, 0, len(wanted), PAD_TOKEN)
    ends = more.cu_seqlens[1:, None].long()
    position = torch.arange(len(wanted), device=ends.device)
    index = (ends - len(wanted) + position).flatten()
    genes = more.genes.index_copy(0, index, wanted.repeat(len(batch.lengths)))
    view = network.view(replace(more, genes=genes), seed=0, step=0)  # with the family's own tokens
    hidden = torch.isin(view.genes, wanted)
    targets = hidden.nonzero().flatten()
    return MaskedBatch.prepared(
        view,
        value_hidden=hidden,
        targets=targets,
        answers=view.values[targets],
        n_targets=torch.tensor(len(targets)),
    )
