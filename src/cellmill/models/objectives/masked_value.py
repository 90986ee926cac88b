"""masked_value: predict the values of masked tokens.

The loss is the cross-entropy of bins, or the squared error of continuous values. Values vary far
more between genes than between cells for the same gene. So they are judged by R² *over the gene
mean*, and by the correlation after subtracting the gene mean from predicted and true values.

A value depends on the sum of all counts of its cell. So visible values leak hidden ones, and both
metrics include this leak. With `renormalize` the model sees values computed only from the counts of
tokens whose own value it sees.

Legend: C cells, T tokens of the batch, N targets, H width of the model.
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
    """Observations, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    values: Any
    predicted: Any  # values, or expected bins


class MaskedValue(MaskedObjective):
    config: MaskedValueConfig
    predicts_genes = False

    @property
    def _first_bin(self) -> int:
        """Lowest bin to predict: 0, the bin of undetected genes, if they are tokens too; otherwise 1."""
        return 0 if self.tokens.zero_frac else 1

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        # the vector of a hidden value in the model's input; families list it in `plan.begin`, so it is
        # not returned here
        model.hidden_value = nn.Parameter(torch.empty(model.width))
        n_outputs = self.tokens.n_values - self._first_bin if self.tokens.values_are_bins else 1
        model.value_out = nn.Linear(model.width, n_outputs)
        return ("value_out",)

    def initial_value(self, name: str) -> Fill | None:
        return normal(STD) if name == "hidden_value" else None

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide values, or replace them by the value of a random visible token of the cell."""
        values = batch.values
        if self.config.renormalize:
            values = self._renormalize(batch, mask.visible | mask.kept)
        # `(C,)`: visible tokens of each cell. Without one there is no value to replace others by, and
        # all masked tokens that are not kept are hidden
        n_visible = torch.bincount(mask.token_cells[mask.visible], minlength=len(batch.lengths))
        is_replaced = mask.replaced & (n_visible > 0)[mask.token_cells]
        is_hidden = mask.hidden | (mask.replaced & ~is_replaced)
        shown = values.masked_fill(is_hidden, 0)
        shown[is_replaced] = values[_choose_visible_tokens(mask, is_replaced, n_visible)]
        # predictions are differences from `center`, the mean of the cell's visible values: no masked value
        # may enter it, whether hidden, kept or replaced
        return {"values": shown, "value_hidden": is_hidden, "enters_center": ~mask.masked}

    def _renormalize(self, batch: Batch, shows_value: Tensor) -> Tensor:
        """Compute values `(T,)` only from the counts of tokens in `shows_value`; 0 for other tokens.

        `shows_value` `(T,)` bool is True for a token whose own value the model sees.
        """
        assert batch.counts is not None, "the batch has no counts"
        counts = batch.counts * shows_value
        cells = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), counts.numpy())
        token_fields = tokenize_counts(cells, self.tokenizer)
        values = torch.zeros_like(batch.values)
        values[counts > 0] = token_fields["values"]  # tokens keep the order of the counts
        return values

    def head_loss(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        predicted = self.predict_from_head(model, head_output, prepared)
        return value_loss(predicted, prepared.targets, self._first_bin)

    def predict_from_head(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        """Predict values `(N,)` float32, or logits of bins `(N, bins)`, from the head's output `(N, H)`."""
        out: Tensor = model.value_out(head_output).float()
        if self.tokens.values_are_bins:
            return out
        # the head predicts the difference from the mean of the cell's visible values
        return out.squeeze(-1) + prepared.center[prepared.token_cells[prepared.target_tokens]]

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
        """Score predicted values against the means of the gene and of all tokens, in training cells.

        In a view values are made from the shown counts, and so are the means.
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
    """Choose a random visible token of the same cell for each replaced token, `(replaced,)` int64.

    `is_replaced` is `(T,)` bool. `n_visible` `(C,)` is the number of visible tokens of each cell.
    """
    visible_tokens = mask.visible.nonzero().flatten()  # indices of tokens, cell after cell
    # `(C,)`: where each cell's tokens begin in `visible_tokens`
    first_visible = n_visible.cumsum(0) - n_visible
    cells = mask.token_cells[is_replaced]
    draws = keyed_bits(mask.draws[is_replaced], REPLACEMENT_KEY)
    return visible_tokens[first_visible[cells] + draws % n_visible[cells]]
