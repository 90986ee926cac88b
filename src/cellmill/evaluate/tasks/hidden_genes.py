"""Cells with some genes hidden from the model, and the model's own prediction of the hidden expression.

A hidden gene is treated as one that was not measured. Its counts are removed before anything is computed from a cell,
so neither values nor the library size reveal them. A model whose tokens include zeros (`tokens.zero_frac`) does not see
it as a zero either.

The predictions use the model's objective and fit nothing on the dataset:

- cell_decoding, denoise, perturbation_response: the decoder's profile of the cell's vector, over the genes that the
  dataset has. The profile's share on visible genes and their counts give the cell's total count, and from it the
  expected counts of the hidden genes. A profile trained on log(1 + count) (`weights: log1p`) gives these logarithms,
  from which counts follow. For Poisson counts the expected logarithm is predicted, because the logarithm of an
  expectation is far larger.
- query_decoding: its answer to a query of the gene.
- masked_value with continuous values: its prediction of a hidden value, for some genes at a time. A model trained
  without zeros predicts as if each gene were detected; a model trained with a share of zeros, as if that were the share
  of hidden genes without counts.

Legend: C cells, F columns of the file, V genes of the vocabulary, M measured genes, G hidden genes, H hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import TARGET_SUM, log_normalise, select_columns
from cellmill.data.stream.batch import Batch, split_batch
from cellmill.evaluate.embed import inference
from cellmill.evaluate.features import embed_counts, keep_columns, tokens_of_counts
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.changes import expected_log_expression
from cellmill.models.batch import PAD_TOKEN, to_tensors, with_extra_tokens
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.masked import MaskedBatch, MaskedValue
from cellmill.models.objectives.query_decoding import QueryDecoding
from cellmill.parallel.vocab_parallel import token_logits


@dataclass(frozen=True)
class HiddenGenes:
    """Counts of some cells, and the genes that are hidden in all of them."""

    context: Context
    counts: sp.csr_matrix  # (C, F)
    genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending

    @cached_property
    def visible(self) -> sp.csr_matrix:
        """(C, F): the counts without those of hidden genes."""
        return keep_columns(self.counts, ~np.isin(self.context.columns.target, self.genes))

    def expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, of all counts of the model's genes."""
        return np.asarray(log_normalise(self.of_vocabulary(self.counts))[:, self.genes].toarray())

    def tokens(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        for batch in tokens_of_counts(self.context, self.visible):
            yield without(batch, self.genes + len(SPECIAL))

    def embedded(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for one without any."""
        return embed_counts(self.context, self.counts, network, self.tokens())

    def of_vocabulary(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """(C, V): counts of the columns of the file, by row of the vocabulary."""
        return select_columns(counts, self.context.columns.target, self.context.model.vocabulary.n_genes)


def without(batch: Batch, tokens: np.ndarray) -> Batch:
    """Leave out tokens of these ids; cells may become empty."""
    kept = ~np.isin(batch.genes, tokens)
    if kept.all():
        return batch
    ends = np.concatenate([[0], np.cumsum(kept)])[batch.cu_seqlens].astype(np.int32)
    filled = np.diff(ends) > 0
    chosen = {"token": kept, "cell": filled}
    return batch.map(lambda per, array: array[chosen[per.axis]], cu_seqlens=ends[np.concatenate([[True], filled])])


CELLS, QUERIED_CELLS = 256, 32  # decoded at once, by a profile or by queries
WANTED = 64  # hidden genes that masked_value predicts in one pass: about the share of a cell that training masks
WANTED_TOKENS = 16_384  # tokens of such a pass, without the wanted ones


def own_expression(hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray | None:
    """(C, G) float32: predicted log(1 + counts per 10,000) from vectors (C, H); None of a model that predicts none."""
    network = hidden.context.model.network
    device = next(network.parameters()).device
    with inference(device, hidden.context.options.precision):
        for part in network.objective.leaves().values():
            if isinstance(part, CellDecoding):
                visible, known = hidden.of_vocabulary(hidden.visible), hidden.context.measured_genes
                measured, columns = (
                    torch.from_numpy(known + len(SPECIAL)).to(device),
                    np.searchsorted(known, hidden.genes),
                )
                found = []
                for first in range(0, len(vectors), CELLS):
                    given = torch.from_numpy(vectors[first : first + CELLS]).to(device)
                    logits = token_logits(network.decoder(given), network.profile_genes.weight, network.profile_bias)  # type: ignore[operator,union-attr,arg-type]
                    shares = logits[:, measured].double().softmax(1).cpu().numpy()[:, columns]
                    found.append(expression_of_shares(shares, visible[first : first + CELLS], part.predicts_log_counts))
                return np.concatenate(found).astype(np.float32)
            if isinstance(part, QueryDecoding):
                genes, found = torch.from_numpy(hidden.genes + len(SPECIAL)).to(device), []
                for given in torch.from_numpy(vectors).split(QUERIED_CELLS):
                    cell = torch.arange(len(given), device=device).repeat_interleave(len(genes))
                    answers = part.answers_of(network, given.to(device), cell, genes.repeat(len(given)))
                    found.append(answers.view(len(given), len(genes)).cpu().numpy())
                return np.maximum(np.concatenate(found), 0)
        objective = network.objective  # alone: a sum may draw a view
        if isinstance(objective, MaskedValue) and objective.tokens.value_kind == "scalar":
            return _unmasked(network, objective, hidden)
    return None


def expression_of_shares(shares: np.ndarray, visible: sp.csr_matrix, is_log: bool) -> np.ndarray:
    """(C, G) float64: expected log(1 + counts per 10,000) of hidden genes.

    `shares`, (C, G), are their shares in the cell's counts, or if `is_log` in the sum of its log(1 + count); `visible`,
    (C, V), are counts of the other genes, which have the rest.
    """
    rest = np.maximum(1 - shares.sum(1), 1e-9)
    depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    if is_log:
        log_depth = np.asarray(visible.astype(np.float64).log1p().sum(axis=1)).ravel()
        counts = counts_of_logs(shares * (log_depth / rest)[:, None])
    else:
        counts = shares * (depth / rest)[:, None]
    total = depth + counts.sum(1)
    return expected_log_expression(counts / np.maximum(total, 1e-9)[:, None], total)


def counts_of_logs(logs: np.ndarray) -> np.ndarray:
    """Mean of Poisson counts whose expected log(1 + count) is `logs`, of the same shape."""
    means = np.concatenate([[0.0], np.logspace(-6, 6, 1200)])
    depth = np.full(1, TARGET_SUM)  # with which counts per 10,000 are counts
    return np.interp(logs, expected_log_expression(means[None] / TARGET_SUM, depth)[0], means)


def _unmasked(network: Model, objective: MaskedValue, hidden: HiddenGenes) -> np.ndarray:
    device = next(network.parameters()).device
    found = np.zeros((hidden.counts.shape[0], len(hidden.genes)), np.float32)
    for batch in (part for block in hidden.tokens() for part in split_batch(block, WANTED_TOKENS)):
        tensors = to_tensors(batch, device)
        for first in range(0, len(hidden.genes), WANTED):
            wanted = torch.from_numpy(hidden.genes[first : first + WANTED] + len(SPECIAL)).to(device)
            prepared = _with_masked(network, tensors, wanted)
            predicted = objective.predict(network, network.head(network.states(prepared)[prepared.targets]), prepared)  # type: ignore[operator]
            by_cell = predicted.float().view(len(batch.cells), len(wanted)).cpu().numpy()
            found[batch.cells, first : first + WANTED] = by_cell
    return np.maximum(found, 0)


def _with_masked(network: Model, batch: Batch, wanted: torch.Tensor) -> MaskedBatch:
    """The cells with the genes `wanted`, token ids that none has, behind their own tokens; their values are hidden."""
    more = with_extra_tokens(batch, 0, len(wanted), PAD_TOKEN)
    ends = more.cu_seqlens[1:, None].long()
    index = (ends - len(wanted) + torch.arange(len(wanted), device=ends.device)).flatten()
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
