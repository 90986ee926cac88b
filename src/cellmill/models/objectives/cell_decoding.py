"""cell_decoding: predict the hidden part of a cell's expression, over the whole vocabulary, from its embedding.

A view of each cell is encoded and pooled to a vector; a decoder turns it into a softmax over all genes, whose
cross-entropy with the hidden expression is the loss. Which genes are on is what a cell is: values of detected genes
alone are mostly sequencing depth. With `weights: counts` this is the multinomial likelihood of the hidden counts given
their sum, divided by the sum; with `likelihood: nb` the negative binomial likelihood of all genes' hidden counts, zeros
included, also divided by the sum. `judge` compares with the mean profile of the training cells.

With `view_loss` the hidden part is encoded too, and VICReg of the vectors of both parts is added in training only.

Legend: C cells with targets, D width of the decoder's last layer, V tokens of the vocabulary.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from cellmill.config.parts.objectives import CellDecodingConfig, DenoiseConfig, PerturbationResponseConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch
from cellmill.models.initial import Fill, with_std, zeros
from cellmill.models.objective import GeneStatistics, Objective, RowShare
from cellmill.models.objectives.terms import Adversary, LevelTerms, vicreg
from cellmill.models.objectives.views import ViewBatch, draw_view
from cellmill.parallel.likelihoods import nb_loss, profile_loss
from cellmill.parallel.vocab_parallel import token_logits
from cellmill.runs.verdict import Verdict, compare


@dataclass(frozen=True, kw_only=True)
class DecodingBatch(EncoderBatch):
    """The shown tokens and the profiles to predict."""

    target_cells: torch.Tensor  # (C,) int64: indices of the cells that have something to predict
    entries: list[int]  # entries of each of these cells
    starts: torch.Tensor  # (C + 1,) int64: the first entry of each of these cells, and their number
    genes_hidden: torch.Tensor  # (entries,) int64: token ids, cell after cell
    weights: torch.Tensor  # (entries,) float32; those of a cell sum to 1. With likelihood nb, the counts
    n_targets: torch.Tensor  # C: each cell counts once, whatever its depth
    pairs: torch.Tensor
    """(2, pairs) int64: indices of the shown and of the hidden part of cells that have both; none without view_loss."""
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's part of the view loss of the global batch; None in the pass that collects its rows."""


class CellDecoding(Objective):
    """See the module; needs a model with `cell_vectors`."""

    config: CellDecodingConfig | DenoiseConfig | PerturbationResponseConfig
    tensor = MappingProxyType({"profile_genes": "vocabulary"})

    gene_rows = frozenset({"profile_genes.weight", "profile_bias", "profile_dispersion"})

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        given = model.vector_width
        self.row_widths = (1 + 2 * given,) if self.config.view_loss else ()
        width = self.config.decoder_hidden or given
        model.decoder = nn.Identity()
        if self.config.decoder_hidden:
            model.decoder = nn.Sequential(with_std(nn.Linear(given, width), given**-0.5), nn.GELU())
        model.profile_genes = with_std(nn.Embedding(n_tokens, width), width**-0.5)
        model.profile_bias = nn.Parameter(torch.empty(n_tokens))
        names = ("decoder", "profile_genes", "profile_bias", *self._attach_batch(model, width))
        if not self._is_nb:
            return names
        model.profile_dispersion = nn.Parameter(torch.empty(n_tokens))
        return (*names, "profile_dispersion")

    def _attach_batch(self, model: Any, width: int) -> tuple[str, ...]:
        column = self.config.batch_column
        if column is None:
            return ()
        n_levels, rows = len(self.levels[column]), ["batch_terms.weight"]
        model.batch_terms = LevelTerms(n_levels, width)
        if self.config.batch_adversary is not None:
            model.batch_adversary = Adversary(model.vector_width, n_levels, self.config.batch_adversary_scale)
            rows += ["batch_adversary.out.weight", "batch_adversary.out.bias"]
        model.level_rows = {**model.level_rows, **dict.fromkeys(rows, column)}
        return tuple(dict.fromkeys(name.split(".")[0] for name in rows))

    def initial_value(self, name: str) -> Fill | None:
        """Initialize the bias to zero, and log dispersions to those of variance mean + mean squared."""
        return zeros if name in ("profile_bias", "profile_dispersion") else None

    def view(self, batch: Batch, *, seed: int, step: int) -> ViewBatch:
        return draw_view(batch, self.tokenizer, self.config, seed=seed, step=step)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> DecodingBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        cell = batch.profile_cell.numpy()
        entries = np.bincount(cell, minlength=len(batch.lengths))
        cells = np.flatnonzero(entries)
        weights = batch.profile_count.double()
        if not self._is_nb:
            weights = weights.log1p() if self.config.weights == "log1p" else weights
            weights /= torch.from_numpy(np.bincount(cell, weights.numpy(), len(entries))[cell])
        lengths = torch.tensor(batch.lengths[: 2 * batch.paired], dtype=torch.int64).view(2, batch.paired)
        first = (lengths > 0).all(0).nonzero().flatten()  # cells with tokens in both views
        return DecodingBatch.prepared(
            batch,
            (seed, step),
            target_cells=torch.from_numpy(cells),
            entries=entries[cells].tolist(),
            starts=torch.from_numpy(np.append(0, entries[cells].cumsum())),
            genes_hidden=batch.profile_gene,
            weights=weights.float(),
            n_targets=torch.tensor(len(cells)),
            pairs=torch.stack([first, first + batch.paired]),
        )

    @property
    def _is_nb(self) -> bool:
        return self.config.likelihood == "nb"

    @property
    def predicts_log_counts(self) -> bool:
        """True if the profile is of log(1 + count), not of counts."""
        return not self._is_nb and self.config.weights == "log1p"

    def loss(self, model: Any, states: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """Return the summed loss, a float32 scalar; in training with VICReg and the adversary's loss."""
        config, vectors = self.config, self._vectors(model, states, prepared)
        decoded, table, bias = self._decoded(model, vectors, prepared), model.profile_genes.weight, model.profile_bias
        hidden = prepared.entries, prepared.starts, prepared.genes_hidden, prepared.weights
        if self._is_nb:
            loss = nb_loss(decoded, table, bias, model.profile_dispersion, *hidden)
        else:
            loss = profile_loss(decoded, table, bias, *hidden)
        if prepared.shares is not None:
            for share, rows in zip(prepared.shares, self.rows(model, states, prepared)):
                loss = loss + share.of(rows)
        if config.batch_adversary is None or not model.training:
            return loss  # validation chooses a checkpoint: an encoder that hides the batch must not count as worse
        return loss + config.batch_adversary * model.batch_adversary(vectors, self._batch_of(prepared))

    def rows(self, model: Any, states: torch.Tensor, prepared: DecodingBatch) -> tuple[torch.Tensor, ...]:
        """(pairs, 1 + 2 H): 1, and the vectors of the shown and of the hidden part."""
        vectors = model.cell_vectors(states, prepared)
        first, second = vectors[prepared.pairs[0]], vectors[prepared.pairs[1]]
        return (torch.cat([first.new_ones(len(first), 1), first, second], dim=1),)

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config, (table,) = self.config, tables
        return (vicreg(table, (config.invariance_weight, config.variance_weight, config.covariance_weight)),)

    def _vectors(self, model: Any, states: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        return model.cell_vectors(states, prepared)[prepared.target_cells].to(states.dtype)

    def _decoded(self, model: Any, vectors: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """(C, D): last layer of the decoder."""
        decoded: torch.Tensor = model.decoder(vectors)
        if self.config.batch_column is None:
            return decoded
        return decoded + model.batch_terms(self._batch_of(prepared)).to(decoded.dtype)

    def _batch_of(self, prepared: DecodingBatch) -> torch.Tensor:
        """(C,) int64: number of each cell's batch."""
        return self.level_numbers(prepared, self.config.batch_column or "")[prepared.target_cells]

    def observe(self, model: Any, prepared: DecodingBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, log-probability and weight of each hidden gene, and its cell's share of all cells."""
        vectors = self._decoded(model, self._vectors(model, model.states(prepared), prepared), prepared)
        log_p = token_logits(vectors, model.profile_genes.weight, model.profile_bias).log_softmax(1)
        lengths = prepared.starts.diff()
        cell = torch.repeat_interleave(lengths, output_size=len(prepared.weights))
        per_cell = (1 / lengths.double())[cell]  # sums to 1 over the entries of a cell
        weights = prepared.weights
        if self._is_nb:  # dispersions are not judged: the mean profile of training cells has none
            weights = weights / weights.new_zeros(len(lengths)).index_add(0, cell, weights)[cell]
        return prepared.genes_hidden - len(SPECIAL), log_p[cell, prepared.genes_hidden], weights, per_cell

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        genes, log_p, weights, per_cell = observed
        value = train.mean if self.tokens.value_kind == "scalar" else 1.0  # other values are no expression
        expressed = train.n * value + 1  # add one: a gene that no training cell has
        mean_profile = np.log(expressed / expressed.sum())
        n_cells = per_cell.sum()
        model, base = (float(-(weights * values).sum() / n_cells) for values in (log_p, mean_profile[genes]))
        metrics = {
            "n_targets": len(genes),
            "cross_entropy": model,
            "cross_entropy_mean_profile": base,
            "saved_frac": 1 - model / base,
        }
        which = "hidden" if self.config.target == "hidden" else "all"
        name, against = f"prediction of {which} genes", "mean profile of training cells"
        return metrics, [compare(name, against, "nats cross-entropy", model - base, lower_is_better=True)]
