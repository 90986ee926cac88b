"""Base classes of objectives with one target per cell, and the head that predicts this target.

The target of a cell is a label, a number, or the vector of a teacher model. It is predicted from the
cell's vector. The head reads the same vectors that `embed` writes, so `evaluate.inference.predict` runs
only the head. (In a `sum` with a view, training computes the vectors from the shown part of each cell.)
Families therefore refuse to train such a head with an `embed_layer` other than the last.

The loss is divided by the number of cells with a target, over all processes. Cells without a target,
and cells without a shown gene, take no part. Validation has no dropout.

A loss that couples the cells of a global batch has the same value in every layout, in training and in
validation (`train.batch_rows`). The training loss and the validation loss then both depend on
`train.global_batch`.

A label is a level of the label column other than MISSING. Tensors contain the index of a label in
`label_names`. The level code of a label is its index plus 1.

In the shapes below, "cells" are all cells of a batch, and "target cells" are the cells with a target.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import LabelConfig
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import EncoderBatch, has_genes
from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.draws import HEAD_DROPOUT_KEY
from cellmill.models.initial import with_std
from cellmill.models.objective import Objective, ObjectiveModel, RowShare, Tensors


class CellHead(nn.Module):
    """A linear layer over cell vectors, after a hidden layer if `hidden` gives its width."""

    def __init__(self, width: int, hidden: int | None, n_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = None if hidden is None else with_std(nn.Linear(width, hidden), width**-0.5)
        last_width = hidden or width
        self.out = with_std(nn.Linear(last_width, n_outputs), last_width**-0.5)

    def forward(self, vectors: Tensor, cell_keys: Tensor | None = None) -> Tensor:
        """Map `vectors` (cells, width) to outputs (cells, n_outputs).

        `cell_keys` (cells,) int64 key the random numbers of the dropout. Without keys, and outside
        training, there is no dropout.
        """
        x = vectors if self.inner is None else F.gelu(self.inner(vectors))
        if cell_keys is not None and self.training and self.dropout:
            x = keyed_dropout(x, self.dropout, keyed_state(cell_keys, HEAD_DROPOUT_KEY))
        outputs: Tensor = self.out(x)
        return outputs


@dataclass(frozen=True, kw_only=True)
class TargetBatch(EncoderBatch):
    """The shown tokens of all cells, and the targets of the cells that have a target."""

    target_cells: Tensor
    """(target cells,) int64: the indices in the batch of the cells with a target and a shown gene."""
    targets: Tensor
    """Indices of labels, (target cells,) int64; or standardised numbers, (target cells,) float32; or
    vectors of a teacher, (target cells, teacher width) float32.
    """
    n_targets: Tensor  # int64 scalar: the number of target cells
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's share of a loss that couples the cells of the global batch.

    None for other losses, and if the model is called outside training and validation.
    """


class CellObjective(Objective):
    """Base of objectives with one target per cell. They need a model with `cell_vectors`.

    A subclass with a head defines `predict` and `target_loss`. A subclass without a head defines `loss`
    and `observe` instead.
    """

    has_target_per_cell = True
    head_name: str
    """Name of the model's attribute that is the head; `attach` sets it."""

    @property
    def validates_coupled_loss(self) -> bool:  # type: ignore[override]
        """True if the loss couples cells: validation then computes it over the global batch too."""
        return bool(self.coupled_widths)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Find the target of each cell, (cells, …), and which cells have a target, (cells,) bool.

        The target of a cell without a target may have any value.
        """
        raise NotImplementedError

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the targets of cells, (cells, …) float32, from their `vectors` (cells, vector width).

        `judge` receives the result unchanged, even if the result is logits. `cell_keys` (cells,) int64
        key the random numbers of the dropout; without keys there is no dropout.
        """
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> TargetBatch:
        targets, has_target = self.find_targets(batch)
        target_cells = (has_target & has_genes(batch)).nonzero().flatten()
        return TargetBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            target_cells=target_cells,
            targets=targets[target_cells],
            n_targets=torch.tensor(len(target_cells)),
        )

    def predict_targets(
        self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch
    ) -> Tensor:
        """Call `predict` for the target cells. `states` (tokens, width) are the states of all tokens."""
        target_cells = prepared.target_cells
        vectors = model.cell_vectors(states, prepared)[target_cells].to(states.dtype)
        return self.predict(model, vectors, prepared.cell_keys[target_cells])

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensor:
        predicted = self.predict_targets(model, states, prepared)
        if self.kept_sums is not None:
            self.kept_sums.append(self.validation_sums(predicted, prepared))
        return self.target_loss(predicted, prepared)

    def validation_sums(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        """Compute the sums over target cells that `validation_metrics` reads, (n_sums,) float64.

        `predicted` is the result of `predict`. Only an objective with `n_sums` defines this method.
        """
        raise NotImplementedError

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        """Sum the loss over the target cells, a float32 scalar. `predicted` is the result of `predict`."""
        raise NotImplementedError

    def coupled_loss(self, rows: Tensor, prepared: TargetBatch) -> Tensor:
        """Compute this micro-batch's share of the loss over the global batch, a float32 scalar.

        `rows` (target cells, row width) are the micro-batch's coupled rows. If `prepared` has no shares,
        the micro-batch is treated as the whole global batch.
        """
        if prepared.shares is None:
            return self.loss_of_coupled_rows(rows)[0].float()
        return prepared.shares[0].loss(rows)

    def observe(self, model: ObjectiveModel, prepared: TargetBatch) -> Tensors:
        return prepared.targets, self.predict_targets(model, model.states(prepared), prepared)


class LabelObjective(CellObjective):
    """Base of objectives whose targets are labels."""

    config: LabelConfig
    # names that subclasses may no longer define, each with its present name
    former_names = MappingProxyType({"labels": "label_names"})

    @property
    def label_names(self) -> list[str]:
        """The names of the labels, in the order of their indices."""
        return self.known_levels(self.config.label_column)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # level codes begin at 1, and 0 is a cell without a label: the index of such a cell is -1
        label_indices = self.level_codes(batch, self.config.label_column) - 1
        return label_indices, label_indices >= 0

    def judged_labels(self) -> dict[str, list[str]]:
        return {self.config.label_column: self.label_names}
