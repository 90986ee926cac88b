"""masked_value: predict the values of masked tokens.

The loss is the cross-entropy of bins, or the squared error of continuous values. The values of different
genes differ far more than the values of one gene in different cells. So `judge` reports R² *over the gene
mean*, whose baseline predicts the mean value of each gene. It also reports a correlation of predicted and
true values, after the mean value of the gene is subtracted from both.

The tokenizer computes a value from all counts of the cell: it divides by their sum, or it bins by their
quantiles. So the visible values reveal something about the hidden values, and all metrics above profit
from this leak. With `renormalize` there is no such leak: the model sees values that are computed only from
the counts of tokens whose own value it sees.

In the shapes below, "tokens" are all tokens of a batch, and "targets" are the masked tokens.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import MaskedValueConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.counter_rng import keyed_bits
from cellmill.models.draws import REPLACEMENT_KEY
from cellmill.models.initial import STD, Fill, normal
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    ObjectiveModel,
    expected_bins,
    pearson,
    r2_over,
    r2_verdicts,
    value_loss,
)
from cellmill.models.objectives.shared.masking import Mask, MaskedBatch, MaskedObjective
from cellmill.models.objectives.shared.views import TokenCounts, tokenize_counts


class ValueObservations(NamedTuple):
    """Observations of masked values, (targets,) each: tensors in `observe`, and arrays in `judge`."""

    genes: Any  # int64: the vocabulary rows of the tokens' genes
    values: Any  # the true values
    predicted: Any  # the predicted values; for bins the mean bin under the predicted probabilities


class MaskedValue(MaskedObjective):
    """Predict the values of masked tokens, whose genes the model sees."""

    config: MaskedValueConfig
    predicts_genes = False

    @property
    def _first_bin(self) -> int:
        """The lowest bin to predict: 0 if undetected genes are tokens too, because their bin is 0, else 1."""
        return 0 if self.tokens.zero_frac else 1

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        # `hidden_value` is the vector that stands for a hidden value in the model's input. Families list
        # it in `plan.begin`, so it is not among the returned names
        model.hidden_value = nn.Parameter(torch.empty(model.width))
        n_outputs = self.tokens.n_values - self._first_bin if self.tokens.values_are_bins else 1
        model.value_out = nn.Linear(model.width, n_outputs)
        return ("value_out",)

    def initial_value(self, name: str) -> Fill | None:
        return normal(STD) if name == "hidden_value" else None

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide the values of masked tokens, or replace them by values of visible tokens of the cell."""
        values = batch.values
        if self.config.renormalize:
            values = self._renormalize(batch, mask.visible | mask.kept)

        # A cell without a visible token has no value that could take the place of another. So its masked
        # tokens that were to be replaced are hidden. `n_visible` (cells,) counts visible tokens
        n_visible = torch.bincount(mask.token_cells[mask.visible], minlength=len(batch.lengths))
        is_replaced = mask.replaced & (n_visible > 0)[mask.token_cells]
        is_hidden = mask.hidden | (mask.replaced & ~is_replaced)

        shown_values = values.masked_fill(is_hidden, 0)
        source_tokens = _choose_visible_tokens(mask, is_replaced, n_visible)
        shown_values[is_replaced] = values[source_tokens]

        # Predictions are added to `center`, the mean of the cell's visible values. No masked value may
        # enter `center`, not even the value of a token that is kept or replaced
        return {"values": shown_values, "value_hidden": is_hidden, "enters_center": ~mask.masked}

    def _renormalize(self, batch: Batch, shows_value: Tensor) -> Tensor:
        """Compute values (tokens,) from the counts of tokens whose own value the model sees.

        `shows_value` (tokens,) bool is True for these tokens. All other tokens get the value 0.
        """
        assert batch.counts is not None, "the batch has no counts"
        counts = batch.counts * shows_value
        cells = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), counts.numpy())
        token_fields = tokenize_counts(cells, self.tokenizer)
        values = torch.zeros_like(batch.values)
        values[counts > 0] = token_fields["values"]  # tokens are in the order of their counts
        return values

    def head_loss(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        predicted = self.predict_from_head(model, head_output, prepared)
        return value_loss(predicted, prepared.targets, self._first_bin)

    def predict_from_head(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        """Predict the values of the targets, (targets,) float32, or the logits of bins, (targets, bins).

        `head_output` is (targets, width).
        """
        out: Tensor = model.value_out(head_output).float()
        if self.tokens.values_are_bins:
            return out
        # the head predicts the difference of a value from the mean of the cell's visible values
        target_cells = prepared.token_cells[prepared.target_tokens]
        return out.squeeze(-1) + prepared.center[target_cells]

    def observe(self, model: ObjectiveModel, prepared: MaskedBatch) -> ValueObservations:
        target_tokens = prepared.target_tokens
        head_output = model.head(model.states(prepared)[target_tokens])
        predicted = self.predict_from_head(model, head_output, prepared)
        if predicted.ndim == 2:
            predicted = expected_bins(predicted, self._first_bin)
        return ValueObservations(
            genes=prepared.token_ids[target_tokens] - len(SPECIAL),
            values=prepared.targets,
            predicted=predicted,
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare the predicted values with mean values of training cells.

        One baseline predicts the mean value of the token's gene, and the other the mean value of all tokens.
        If the model reads a view, the values and their means are computed from the shown counts.
        """
        observations = ValueObservations(*observed)
        values = observations.values.astype(np.float64)
        predicted = observations.predicted.astype(np.float64)
        mse = float(np.mean((values - predicted) ** 2))

        gene_means = statistics.mean[observations.genes]
        mse_gene_mean = float(np.mean((values - gene_means) ** 2))
        mse_global_mean = float(np.mean((values - statistics.global_mean) ** 2))

        r2 = r2_over(mse_gene_mean, mse)
        metrics: dict[str, Any] = {
            "n_targets": len(values),
            "mse": mse,
            "r2_over_gene_mean": r2,
            "r2_over_global_mean": r2_over(mse_global_mean, mse),
            "pearson_gene_centred": pearson(values - gene_means, predicted - gene_means),
            "mse_gene_mean": mse_gene_mean,
            "mse_global_mean": mse_global_mean,
        }
        return metrics, r2_verdicts("prediction of masked values", "the gene's training mean", r2)


def _choose_visible_tokens(mask: Mask, is_replaced: Tensor, n_visible: Tensor) -> Tensor:
    """Choose a random visible token of the same cell for each replaced token.

    Return the indices of the chosen tokens, (replaced tokens,) int64. `is_replaced` is (tokens,) bool, and
    `n_visible` (cells,) is the number of visible tokens of each cell.
    """
    visible_tokens = mask.visible.nonzero().flatten()  # indices of tokens, one cell after another
    # (cells,): the index in `visible_tokens` of the first visible token of each cell
    first_visible = n_visible.cumsum(0) - n_visible
    cells = mask.token_cells[is_replaced]
    draws = keyed_bits(mask.draws[is_replaced], REPLACEMENT_KEY)
    return visible_tokens[first_visible[cells] + draws % n_visible[cells]]
