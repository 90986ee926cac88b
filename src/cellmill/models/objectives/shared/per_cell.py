"""Base of objectives with one target per cell, predicted from the cell's vector, and their head.

The vectors are what `embed` writes, so `evaluate.inference.predict` runs only the head. Families
refuse to train such a head with another `embed_layer` than the last.
The loss is divided by the number of cells with a target, over all processes. Cells without a target
and cells without a shown gene take no part. Validation has no dropout.

Losses that couple the cells of a global batch are equal in every layout (`train.batch_rows`), in
training and in validation. Their validation loss depends on `train.global_batch` too.

A label is a level of the label column other than MISSING. Tensors have its index in `label_names`; its
level code is the index plus 1.

Legend: T tokens of the batch, C cells (in training those with a target), H width of a state, E width of
a cell's vector, L outputs of the head (for labels the number of levels, for a number 1), D width of a
teacher's vector.
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
    """A linear layer over cell vectors, after a hidden layer if `hidden` is given."""

    def __init__(self, width: int, hidden: int | None, n_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = None if hidden is None else with_std(nn.Linear(width, hidden), width**-0.5)
        last_width = hidden or width
        self.out = with_std(nn.Linear(last_width, n_outputs), last_width**-0.5)

    def forward(self, vectors: Tensor, cell_keys: Tensor | None = None) -> Tensor:
        """Map `vectors` `(C, E)` to outputs `(C, L)`.

        `cell_keys` `(C,)` int64 key the dropout, which only training has.
        """
        x = vectors if self.inner is None else F.gelu(self.inner(vectors))
        if cell_keys is not None and self.training and self.dropout:
            x = keyed_dropout(x, self.dropout, keyed_state(cell_keys, HEAD_DROPOUT_KEY))
        outputs: Tensor = self.out(x)
        return outputs


@dataclass(frozen=True, kw_only=True)
class TargetBatch(EncoderBatch):
    """The shown tokens, and the target of the cells that have one."""

    target_cells: Tensor  # `(C,)` int64: indices of the cells with a target and genes
    targets: Tensor
    """Indices of labels, `(C,)` int64; standardised numbers, `(C,)` float32; or a teacher's vectors,
    `(C, D)` float32.
    """
    n_targets: Tensor  # C
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's share of a loss that couples the cells of the global batch.

    None for other losses, and in a call of the model outside training and validation.
    """


class CellObjective(Objective):
    """Base of objectives with one target per cell; they need a model with `cell_vectors`.

    An objective without a head defines `loss` and `observe` instead of `predict` and `target_loss`.
    """

    has_target_per_cell = True
    head_name: str
    """Attribute of the model that has the head; set by `attach`."""

    @property
    def validates_coupled_loss(self) -> bool:  # type: ignore[override]
        """True if the loss couples cells; validation then takes it over the global batch too."""
        return bool(self.coupled_widths)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Find the target of each cell, `(cells, …)`, and which cells have one, `(cells,)` bool."""
        raise NotImplementedError

    def predict(
        self, model: ObjectiveModel, vectors: Tensor, cell_keys: Tensor | None = None
    ) -> Tensor:
        """Predict the targets, `(C, …)` float32, from the cells' `vectors`, `(C, E)`.

        `judge` gets the result as it is, also if it is logits. `cell_keys` `(C,)` int64 key the
        dropout; None turns it off.
        """
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> TargetBatch:
        targets, has_target = self.find_targets(batch)
        cells = (has_target & has_genes(batch)).nonzero().flatten()
        return TargetBatch.from_batch(
            batch,
            dropout_keys=(seed, step),
            target_cells=cells,
            targets=targets[cells],
            n_targets=torch.tensor(len(cells)),
        )

    def predict_targets(
        self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch
    ) -> Tensor:
        """Call `predict` for the cells with a target, given the states of all tokens, `(T, H)`."""
        cells = prepared.target_cells
        vectors = model.cell_vectors(states, prepared)[cells].to(states.dtype)
        return self.predict(model, vectors, prepared.cell_keys[cells])

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: TargetBatch) -> Tensor:
        predicted = self.predict_targets(model, states, prepared)
        if self.kept_sums is not None:
            self.kept_sums.append(self.validation_sums(predicted, prepared))
        return self.target_loss(predicted, prepared)

    def validation_sums(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        """Sum over targets what `validation_metrics` reads, `(n_sums,)` float64.

        Only objectives with `n_sums` define it. `predicted` is what `predict` returned.
        """
        raise NotImplementedError

    def target_loss(self, predicted: Tensor, prepared: TargetBatch) -> Tensor:
        """Sum the loss of what `predict` returned, a float32 scalar."""
        raise NotImplementedError

    def coupled_loss(self, rows: Tensor, prepared: TargetBatch) -> Tensor:
        """Compute this micro-batch's share of the loss over the global batch, a float32 scalar.

        `rows` `(C, width)` are its coupled rows. Without `prepared.shares` they are the global batch.
        """
        if prepared.shares is None:
            return self.loss_of_coupled_rows(rows)[0].float()
        return prepared.shares[0].loss(rows)

    def observe(self, model: ObjectiveModel, prepared: TargetBatch) -> Tensors:
        return prepared.targets, self.predict_targets(model, model.states(prepared), prepared)


class LabelObjective(CellObjective):
    """Base of objectives whose targets are labels."""

    config: LabelConfig
    former_names = MappingProxyType({"labels": "label_names"})

    @property
    def label_names(self) -> list[str]:
        """List the labels, in the order of their indices."""
        return self.known_levels(self.config.label_column)

    def find_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # codes begin at 1 and 0 is unknown, so a cell without a label gets -1
        label_indices = self.level_codes(batch, self.config.label_column) - 1
        return label_indices, label_indices >= 0

    def judged_labels(self) -> dict[str, list[str]]:
        return {self.config.label_column: self.label_names}
