"""cell_decoding: predict the hidden part of a cell's expression from the cell's vector, over all genes.

The model encodes a view of each cell and pools the states to a vector. A decoder turns the vector into a
softmax over all genes, and the loss is the cross-entropy of the hidden expression. All genes are predicted,
because a cell is defined by which genes it expresses. The values of detected genes mostly reflect
sequencing depth.

The target of a cell is a distribution over genes:

- By default it is the hidden log(1 + counts) of the cell, divided by their sum.
- With `weights: counts` it is the hidden counts, divided by their sum. The loss is then, up to a constant
  of the cell, the negative log-likelihood of a multinomial of the hidden counts, divided by their sum.
- With `likelihood: nb` the targets are the hidden counts themselves. The loss is the negative
  log-likelihood of negative binomials over all genes, zeros included, also divided by the sum of the
  counts.

With `view_loss` the hidden part is encoded too. Training then adds VICReg, a loss of the vectors of both
parts. Validation leaves VICReg out.

With `batch_column` the decoder has a learned vector for each experimental batch. In names of options and
modules, `batch_…` means the experimental batch (`batch_key` of scVI).

The baseline of `judge` is the mean profile of training cells: the mean of the targets that views of these
cells have. Objective `denoise` is the same class with `view: thin` and `target: all`, which predicts whole
cells instead of hidden parts.

In the shapes below, "cells" are all cells of a batch, "target cells" are the cells with something to
predict, and "entries" are the genes of target cells with the counts to predict. "width" is the width of a
state, "vector width" the width of a cell's vector, and "feature width" the input width of the decoder's
output layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch, has_genes
from cellmill.models.initial import Fill, with_std, zeros
from cellmill.models.objective import (
    HIDDEN_GENES_STEP,
    GeneStatistics,
    Judgement,
    Objective,
    ObjectiveModel,
    RowShare,
    Tensors,
    cross_entropy_verdicts,
)
from cellmill.models.objectives.shared.hidden_genes import (
    mean_gene_correlation,
    n_moment_sums,
    sum_gene_moments,
)
from cellmill.models.objectives.shared.level_modules import Adversary, LevelEmbedding
from cellmill.models.objectives.shared.vicreg import vicreg_loss_sum
from cellmill.models.objectives.shared.views import ViewBatch, ViewConfig, draw_view
from cellmill.parallel.likelihoods import profile_loss
from cellmill.parallel.vocab_parallel import token_logits


@dataclass(frozen=True, kw_only=True)
class DecodingBatch(EncoderBatch):
    """The shown tokens of each cell, and the profiles to predict."""

    target_cells: Tensor  # (target cells,) int64: the indices in the batch of cells to predict
    n_entries: list[int]
    """The number of entries of each target cell.

    `entry_starts` contains the same numbers. But `entry_starts` may be on a GPU, and to read from a GPU
    would make the CPU wait.
    """
    entry_starts: Tensor
    """(target cells + 1,) int64: the first entry of each target cell, then the number of entries."""
    entry_token_ids: Tensor  # (entries,) int64, one cell after another
    entry_targets: Tensor
    """(entries,) float32: counts with likelihood nb, otherwise fractions with sum 1 in each cell."""
    n_targets: Tensor
    """int64 scalar: the number of target cells, since each cell counts once, whatever its depth."""
    pairs: Tensor
    """(2, pairs) int64: the indices of both views of each target cell that has genes in both views.

    There are no pairs without `view_loss`.
    """
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's share of the view loss; None in validation, which leaves the view loss out."""

    def find_entry_rows(self) -> Tensor:
        """Find the row of each entry's cell among `target_cells`, (entries,) int64.

        If cells 1 and 3 of a batch have two and three entries, and other cells have none:

            target_cells  1 3
            entry_starts  0 2 5
            the result    0 0 1 1 1
        """
        return torch.repeat_interleave(
            self.entry_starts.diff(), output_size=len(self.entry_token_ids)
        )


class ProfileObservations(NamedTuple):
    """Observations of profiles, (entries,) each: tensors in `observe`, and arrays in `judge`."""

    genes: Any  # int64: the vocabulary rows of the genes
    log_p: Any  # the predicted log-probability of the gene in its cell
    fractions: Any  # float32: the true fraction of the gene, with sum 1 in each cell
    cell_weights: Any
    """float64: 1 / the number of entries of the cell. So the sum of the weights is the number of cells."""


class CellDecoding(Objective):
    """Predict hidden expression from the vector of a cell's view; also objective `denoise`."""

    config: ViewConfig
    tensor_parallel_styles = MappingProxyType({"profile_genes": "vocabulary"})
    # names that subclasses may no longer define, each with its present name
    former_names = MappingProxyType({"decode": "decoder_features"})
    gene_rows = frozenset({"profile_genes.weight", "profile_bias", "profile_dispersion"})
    metric_names = ("hidden_genes",)
    uses_hidden_genes = True

    @property
    def predicts_counts(self) -> bool:
        """True if the targets are counts, which a negative binomial for each gene predicts."""
        return self.config.likelihood == "nb"

    @property
    def predicts_log_counts(self) -> bool:
        """True if the targets are fractions of the sum of log(1 + count), not of the sum of counts."""
        return not self.predicts_counts and self.config.weights == "log1p"

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the decoder: a hidden layer, unless `decoder_hidden` is null, and an output layer.

        Depending on the options, the decoder also has vectors of experimental batches, and dispersions of
        genes.
        """
        config = self.config
        vector_width = model.vector_width
        self.n_sums = n_moment_sums(vocab_size)
        self.coupled_widths = (1 + 2 * vector_width,) if config.view_loss else ()

        feature_width = config.decoder_hidden or vector_width
        if config.decoder_hidden:
            layer = with_std(nn.Linear(vector_width, feature_width), vector_width**-0.5)
            model.decoder = nn.Sequential(layer, nn.GELU())
        else:
            model.decoder = nn.Identity()
        model.profile_genes = with_std(nn.Embedding(vocab_size, feature_width), feature_width**-0.5)
        model.profile_bias = nn.Parameter(torch.empty(vocab_size))
        names = ["decoder", "profile_genes", "profile_bias"]

        batch_column = config.resolved_batch_column
        if batch_column is not None:
            names += self._attach_experimental_batches(model, batch_column, feature_width)
        if self.predicts_counts:
            # it holds the log of each gene's inverse dispersion; checkpoints have this shorter name
            model.profile_dispersion = nn.Parameter(torch.empty(vocab_size))
            names.append("profile_dispersion")
        return tuple(names)

    def _attach_experimental_batches(
        self, model: ObjectiveModel, column: str, feature_width: int
    ) -> list[str]:
        """Add a learned vector for each experimental batch and, if configured, the adversary.

        `column` is the obs column of the experimental batch. Return the names of the added modules.
        """
        n_levels = len(self.levels[column])
        n_known = len(self.known_levels(column))
        # these are the learned vectors; checkpoints have this name
        model.batch_terms = LevelEmbedding(n_levels, n_known, feature_width)
        model.add_level_rows(column, "batch_terms.weight")
        names = ["batch_terms"]
        if self.config.batch_adversary is not None:
            scale = self.config.batch_adversary_scale
            model.batch_adversary = Adversary(model.vector_width, n_levels, n_known, scale)
            names.append("batch_adversary")
            rows = ("batch_adversary.out.weight", "batch_adversary.out.bias")
            model.add_level_rows(column, *rows)
        return names

    def initial_value(self, name: str) -> Fill | None:
        """Start biases and log inverse dispersions at 0.

        The inverse dispersion of each gene then starts at 1, and its variance at mean + mean².
        """
        return zeros if name in ("profile_bias", "profile_dispersion") else None

    def view(self, batch: Batch, *, seed: int, step: int) -> ViewBatch:
        return draw_view(
            batch,
            self.tokenizer,
            self.config,
            seed=seed,
            step=step,
            hides_metric_genes=step == HIDDEN_GENES_STEP,
        )

    def prepare(self, batch: Batch, *, seed: int, step: int) -> DecodingBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        # cells without an entry have nothing to predict
        entry_cells = batch.entry_cells.numpy()
        n_entries_of_all = np.bincount(entry_cells, minlength=len(batch.lengths))  # (cells,)
        target_cells = np.flatnonzero(n_entries_of_all)
        n_entries = n_entries_of_all[target_cells]
        return DecodingBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            target_cells=torch.from_numpy(target_cells),
            n_entries=n_entries.tolist(),
            entry_starts=torch.from_numpy(np.append(0, n_entries.cumsum())),
            entry_token_ids=batch.entry_token_ids,
            entry_targets=self._compute_targets(batch),
            n_targets=torch.tensor(len(target_cells)),
            pairs=_find_pairs(batch, target_cells),
        )

    def _compute_targets(self, batch: ViewBatch) -> Tensor:
        """Compute the target of each entry, (entries,) float32.

        Targets are counts with likelihood nb, otherwise fractions with sum 1 in each cell.
        """
        targets = batch.entry_counts.double()
        if self.predicts_counts:
            return targets.float()
        if self.predicts_log_counts:
            targets = targets.log1p()
        # divide by the sum of the cell, in float64
        entry_cells = batch.entry_cells.numpy()
        cell_sums = np.bincount(entry_cells, targets.numpy(), len(batch.lengths))
        targets /= torch.from_numpy(cell_sums[entry_cells])
        return targets.float()

    def _compute_fractions(self, prepared: DecodingBatch) -> Tensor:
        """Turn the targets of entries into fractions with sum 1 in each cell, (entries,) float32."""
        targets = prepared.entry_targets
        if not self.predicts_counts:
            return targets
        entry_rows = prepared.find_entry_rows()
        cell_sums = targets.new_zeros(len(prepared.n_entries)).index_add(0, entry_rows, targets)
        return targets / cell_sums[entry_rows]

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: DecodingBatch) -> Tensor:
        """Sum the loss over the target cells, a float32 scalar.

        In training, VICReg and the loss of the adversary are added if they are configured.
        """
        vectors = self._target_cell_vectors(model, states, prepared)
        features = self.decoder_features(model, vectors, prepared)
        if self.kept_sums is not None:
            self.kept_sums.append(self._validation_sums(model, features, prepared))

        loss = profile_loss(
            features,
            table=model.profile_genes.weight,
            bias=model.profile_bias,
            n_entries=prepared.n_entries,
            entry_starts=prepared.entry_starts,
            entry_token_ids=prepared.entry_token_ids,
            entry_targets=prepared.entry_targets,
            log_inverse_dispersion=model.profile_dispersion if self.predicts_counts else None,
        )

        # VICReg couples the cells of the global batch, so this micro-batch adds its share of VICReg
        if prepared.shares is not None:
            (rows,) = self.coupled_rows(model, states, prepared)
            loss = loss + prepared.shares[0].loss(rows)

        # The adversary predicts the experimental batch, and its loss rises while the encoder learns to
        # hide the batch. In the validation loss, by which training chooses the best checkpoint, the loss
        # of the adversary would make a better encoder look worse
        adversary_weight = self.config.batch_adversary
        if adversary_weight is not None and model.training:
            codes = self._experimental_batch_codes(prepared)
            loss = loss + adversary_weight * model.batch_adversary(vectors, codes)
        return loss

    def _validation_sums(
        self, model: ObjectiveModel, features: Tensor, prepared: DecodingBatch
    ) -> Tensor:
        """Compute the sums over target cells that `validation_metrics` reads, (n_sums,) float64."""
        return sum_gene_moments(
            features,
            table=model.profile_genes.weight,
            bias=model.profile_bias,
            entry_rows=prepared.find_entry_rows(),
            entry_token_ids=prepared.entry_token_ids,
            entry_fractions=self._compute_fractions(prepared),
        )

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return mean_gene_correlation(sums)

    def coupled_rows(
        self, model: ObjectiveModel, states: Tensor, prepared: DecodingBatch
    ) -> Tensors:
        """Make the row [1, vector of the shown part, vector of the hidden part] of each pair.

        The rows are (pairs, 1 + 2 * vector width) float32.
        """
        vectors = model.cell_vectors(states, prepared)
        shown = vectors[prepared.pairs[0]]
        hidden = vectors[prepared.pairs[1]]
        return (torch.cat([shown.new_ones(len(shown), 1), shown, hidden], dim=1),)

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        config = self.config
        weights = (config.invariance_weight, config.variance_weight, config.covariance_weight)
        return tuple(vicreg_loss_sum(table, weights) for table in tables)

    def decoder_features(
        self, model: ObjectiveModel, vectors: Tensor, prepared: DecodingBatch
    ) -> Tensor:
        """Compute the input of the decoder's output layer, (target cells, feature width).

        `vectors` (target cells, vector width) are the vectors of the cells. The output layer multiplies the
        features by `profile_genes`, and adds `profile_bias`.
        """
        features: Tensor = model.decoder(vectors)
        if self.config.resolved_batch_column is None:
            return features
        codes = self._experimental_batch_codes(prepared)
        return features + model.batch_terms(codes).to(features.dtype)

    def _target_cell_vectors(
        self, model: ObjectiveModel, states: Tensor, prepared: DecodingBatch
    ) -> Tensor:
        """Return the vectors of the target cells, (target cells, vector width).

        `states` (tokens, width) are the states of all tokens of the batch.
        """
        return model.cell_vectors(states, prepared)[prepared.target_cells].to(states.dtype)

    def _experimental_batch_codes(self, prepared: DecodingBatch) -> Tensor:
        """Return the level code of each target cell's experimental batch, (target cells,) int64."""
        column = self.config.resolved_batch_column
        assert column is not None, "no column of experimental batches"
        return self.level_codes(prepared, column)[prepared.target_cells]

    def observe(self, model: ObjectiveModel, prepared: DecodingBatch) -> ProfileObservations:
        vectors = self._target_cell_vectors(model, model.states(prepared), prepared)
        features = self.decoder_features(model, vectors, prepared)
        logits = token_logits(features, model.profile_genes.weight, model.profile_bias)
        # With likelihood nb the softmax is observed too. Dispersions are not judged, because the
        # baseline, the mean profile of training cells, has none. Special tokens get probabilities,
        # although they are never targets
        log_p = logits.log_softmax(1)
        entry_rows = prepared.find_entry_rows()
        token_ids = prepared.entry_token_ids
        return ProfileObservations(
            genes=token_ids - len(SPECIAL),
            log_p=log_p[entry_rows, token_ids],
            fractions=self._compute_fractions(prepared),
            cell_weights=(1 / prepared.entry_starts.diff().double())[entry_rows],
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare the cross-entropy of the model with the cross-entropy of the mean profile.

        The mean profile is the mean of the targets of training cells. These are the fractions of expression
        that views of these cells hide or, with `target: all`, the fractions of their whole expression.
        """
        entries = ProfileObservations(*observed)
        fractions = entries.fractions.astype(np.float64)
        log_p = entries.log_p.astype(np.float64)
        n_cells = entries.cell_weights.sum()
        loss = float(-(fractions * log_p).sum() / n_cells)

        mean_profile = statistics.count_profile
        if self.predicts_log_counts:
            mean_profile = statistics.log_count_profile
        assert mean_profile is not None, "statistics without profiles"
        baseline_loss = float(-(fractions * np.log(mean_profile[entries.genes])).sum() / n_cells)

        metrics = {
            "n_targets": round(n_cells),
            "n_entries": len(log_p),
            "cross_entropy": loss,
            "cross_entropy_mean_profile": baseline_loss,
            "cross_entropy_reduction_frac": 1 - loss / baseline_loss,
        }

        # it is not called "hidden genes", because view thin hides counts of all genes
        predicted_part = "whole cell" if self.config.target == "all" else "hidden expression"
        name = f"prediction of the {predicted_part}"
        against = "the mean profile of training cells"
        return metrics, cross_entropy_verdicts(name, against, loss - baseline_loss)


def _find_pairs(batch: ViewBatch, target_cells: np.ndarray) -> Tensor:
    """Find the pairs of views of target cells that have genes in both views, (2, pairs) int64.

    The first row has the indices of first views, and the second row the indices of second views. If there
    are three cells, and the second cell has an empty second view: [[0, 2], [3, 5]].
    """
    n_cells = batch.n_second_views
    # the batch has the first views, then the second views, then padding. Only first views are targets
    first_views = torch.from_numpy(target_cells[:n_cells])  # empty if there are no second views
    views = torch.stack([first_views, first_views + n_cells])
    return views[:, has_genes(batch)[views].all(0)]
