"""The contract of an objective, in one file: its targets, its loss, and its metrics in `evaluate`.

An objective holds no parameters. Its heads are modules that become attributes of the model. The objective
chooses their names. So checkpoints, layouts and exports treat heads like all other modules of the model.

The options class of an objective (`config.parts.objective.ObjectiveConfig`) does not import torch. It says
what the objective needs and which runs it suits:

- `families` are the families that can train it
- `needs_counts` is True if batches must carry counts
- `draws_view` is True if it draws a view, and `owns_tokens` is True if it hides tokens or reads tokens as
  targets; a sum may have one part of each kind
- `label_option` is the option that names the labels; a run with labels counts as supervised
- `reads_cells` is True if the loss reads the vectors of cells
- `stream` returns its defaults for section `stream`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.corpus import MISSING
from cellmill.config.parallel import Style
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import refuse_former_names
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer
from cellmill.models.initial import Fill
from cellmill.runs.results import Verdict, compare

# Outside training, these numbers take the place of the step in the keys of views and masks
# (`models/draws.py`)
EVALUATION_STEP = 0  # in task `reconstruct`
VALIDATION_STEP = -1  # in validation
HIDDEN_GENES_STEP = -2  # for metric hidden_genes, whose views hide the same genes from all cells
STATISTICS_STEP = -3  # for `GeneStatistics`, from training cells

MIN_VARIANCE_FRAC = 1e-9
"""A variance that is at most this fraction of the mean square is a rounding error, and counts as 0."""

# the present names of methods and attributes, by the former names that subclasses may not define any more
FORMER_NAMES = {
    "tensor": "tensor_parallel_styles",
    "row_widths": "coupled_widths",
    "rows": "coupled_rows",
    "loss_of_rows": "loss_of_coupled_rows",
    "validates_rows": "validates_coupled_loss",
    "level_numbers": "level_codes",
    "leaves": "parts_by_name",
}

Tensors = tuple[Tensor, ...]
Judgement = tuple[dict[str, Any], list[Verdict]]
"""The metrics of a judged objective by name, and the verdicts against a baseline."""


@dataclass(frozen=True)
class GeneStatistics:
    """Statistics of the tokens of training cells, by gene. The baselines of `judge` read them.

    "genes" in the shapes below is the number of genes in the vocabulary.
    """

    n_tokens: np.ndarray  # (genes,) int64: the number of tokens of each gene
    mean: np.ndarray
    """(genes,) float64: the mean value of each gene's tokens.

    For a gene without tokens it is the mean value of all tokens.
    """
    global_mean: float  # the mean value of all tokens
    n_cells: int  # the number of training cells that the statistics count
    by_rank: np.ndarray | None = None
    """(buckets, genes) int64: the number of tokens of each gene in each bucket of positions in the cell.

    Positions count from 0. The bucket of a position is log2(position + 1), rounded down
    (`data.rank_order.rank_buckets`).
    """
    count_profile: np.ndarray | None = None
    """(genes,) float64 with sum 1: the mean over cells of each gene's fraction of the counts to predict.

    The counts to predict are all counts of the cell or, if only the hidden part is to be predicted, the
    counts that the cell's view hides. No gene has a mean of 0, because one further cell counts that has
    all genes in equal parts. None unless the objective needs counts.
    """
    log_count_profile: np.ndarray | None = None
    """The same mean of each gene's fraction of the sum of log(1 + count to predict)."""
    shown: "GeneStatistics | None" = None
    """The statistics of the tokens that views show.

    None unless a part of a sum reads a view that another part draws.
    """


class ObjectiveModel(Protocol):
    """A model as its objective sees the model: a `models.family.Model` with heads as attributes.

    A state is the output of the model for one token. In family profile it is the output for one cell.
    """

    training: bool
    width: int  # the width of a state
    head_activation: type[nn.Module]  # the activation of heads, between their linear layer and norm
    head_norm_eps: float  # the epsilon of the norms of heads

    @property
    def vector_width(self) -> int:
        """The width of a cell's vector. It is `width`, unless the family narrows vectors."""

    def states(self, prepared: Any) -> Tensor:
        """Compute the states, (tokens, width), after the norm that follows the blocks.

        `prepared` is a result of the objective's `prepare`.
        """

    def cell_vectors(self, states: Tensor, prepared: Any) -> Tensor:
        """Pool `states` (tokens, width) to the vector of each cell, (cells, vector_width) float32."""

    def add_level_rows(self, column: str, *names: str) -> None:
        """Declare that the parameters `names` have a row for each level of an obs column.

        `init_from` then matches their rows by the names of the levels.
        """

    def __getattr__(self, name: str) -> Any:
        """Get a head, or a module that only some families have, such as `gene_embedding`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Add a head, which is a module or a parameter."""


class Objective:
    """Base of every objective. Its methods are called in this order:

    - `__init__` takes the options. A sum then sets `in_view` of its parts.
    - `attach` adds the heads. Before it, `levels` is set, and for a part of a sum also `suffix` and
      `number_columns`. `attach` may set `coupled_widths`, `n_sums`, `in_validation_loss` and
      `validates_coupled_loss`, which are final only after it.
    - `view` and then `prepare` are called for each batch, on the CPU. Before each call of `prepare`,
      `Model.prepare` sets `training`.
    - `loss` is called with the model's states of the batch. In task `reconstruct`, `observe` is called for
      each batch instead, and then `judge` once if there is a target.
    """

    former_names: ClassVar[Mapping[str, str]] = MappingProxyType(FORMER_NAMES)
    """Present names of attributes, by former names. A subclass that defines a former name is refused."""

    # heads
    tensor_parallel_styles: Mapping[str, Style] = MappingProxyType({})
    """The tensor-parallel style of heads, by path in the model. Other heads are replicated."""
    gene_rows: frozenset[str] = frozenset()
    """Names of the parameters of heads that have a row for each token id.

    `init_from` matches their rows by gene.
    """

    # batches
    training: bool = True
    """False while `prepare` is called for validation or evaluation. `Model.prepare` sets it."""
    in_view: bool = False
    """True for a part of a sum if its batches are views that another part draws.

    The random draws of its `prepare` then need other keys than the draws of the view
    (`models/draws.py`).
    """
    has_target_per_cell: bool = False
    """True if the target is a label, number or vector that a cell may lack (`CellObjective`).

    Training logs the fraction of cells that have a target as `labelled_frac`.
    """

    # loss
    part_weights: Mapping[str, float] = MappingProxyType({})
    """The weight of each part of a sum, by name. Empty if the loss is one number, not a vector."""
    coupled_widths: tuple[int, ...] = ()
    """The width of each table of `coupled_rows`. Empty if the loss of a cell depends on no other cell."""

    # validation
    in_validation_loss: bool = True
    """False for a part of a sum if `val_loss` leaves its loss out.

    metrics.jsonl then still has the loss of the part, under the name of the part.
    """
    validates_coupled_loss: bool = False
    """True if `loss` needs shares in validation too. A `CellObjective` derives it from `coupled_widths`."""
    metric_names: tuple[str, ...] = ()
    """Names of further metrics that validation logs, such as accuracy: the keys of `validation_metrics`."""
    n_sums: int = 0
    """The number of sums over cells or targets that `validation_metrics` reads."""
    kept_sums: list[Tensor] | None = None
    """If it is a list, `loss` appends the sums over the micro-batch to the list, (n_sums,) float64."""
    uses_hidden_genes: bool = False
    """True if `validation_metrics` needs the views of HIDDEN_GENES_STEP (`objectives/shared/views.py`).

    Validation draws these views only if one of the metrics is `train.best_metric`.
    """

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            refuse_former_names(cls, vars(base).get("former_names", {}))

    def __init__(self, config: ObjectiveConfig, tokens: Tokens) -> None:
        self.config = config
        self.tokens = tokens
        self.number_columns = sorted(config.columns().numbers)
        """The obs columns of the numbers that batches carry, in the order of the numbers.

        In a sum these are the columns of all parts.
        """
        self.suffix = ""
        """The end of the names of heads that several parts of a sum may have, such as heads of labels.

        A sum sets it before `attach`: to `_` and the name of the part, or to nothing if the name of the part
        is the name of the objective.
        """
        self.levels: Mapping[str, Sequence[str]] = {}
        """The levels of each obs column that batches carry, by column, in the order of their codes.

        `models.build` sets it before `attach`.
        """

    def known_levels(self, column: str) -> list[str]:
        """List the levels of an obs column in the order of their codes, without MISSING."""
        return [level for level in self.levels[column] if level != MISSING]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. It computes the values of a view from a part of the cell's counts."""
        return self.tokens.load()(self.tokens)

    def level_codes(self, batch: Batch, column: str) -> Tensor:
        """Return the code of each cell's level of an obs column, (cells,) int64.

        Codes begin at 1, and an unknown level has code 0. The level MISSING has code 0 too, because a cell
        without a value has no label, batch or perturbation.
        """
        assert batch.levels is not None, "the batch has no levels"
        codes: Tensor = batch.levels[:, [*self.levels].index(column)]
        levels = self.levels[column]
        if MISSING in levels:
            codes = codes.masked_fill(codes == 1 + levels.index(MISSING), 0)
        return codes

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the heads to `model` as attributes, on the meta device.

        `vocab_size` is the number of token ids, which stand for genes and special tokens. Return the names of
        all modules and parameters of the model that `loss` reads, including the heads. If `Model.begin` reads
        such a module too, the first and the last pipeline stage both have the module and tie its parameters.
        """
        raise NotImplementedError

    def parts_by_name(self) -> "Mapping[str, Objective]":
        """Return the parts of a sum by name. Any other objective returns itself under the name ""."""
        return {"": self}

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Compute the metrics in `metric_names`, by name.

        `sums` (n_sums,) are the `kept_sums` of `loss`, added up over all validation cells.
        """
        return {}

    def initial_value(self, name: str) -> Fill | None:
        """Return the function that fills the parameter `name` with initial values.

        `name` is a parameter that `attach` added to the model itself. None for any other name.
        """
        return None

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        """Choose which tokens of a batch the model is given, on the CPU. By default these are all tokens.

        If `prepare` needs something of hidden tokens, the result is of a subclass of Batch that carries it.
        An objective that `uses_hidden_genes` returns the views of its metrics at step HIDDEN_GENES_STEP.

        The view of a cell is a pure function of (seed, step, cell) and of the cell's counts in their order.
        """
        return batch

    def prepare(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Draw the masks and the targets of a view.

        This is a pure function of its arguments and of `self.training`. It reads no parameters. The result
        has the attributes `lengths`, a list[int] with the number of tokens of each cell, and `n_targets`, the
        number of targets. `n_targets` is an int64 scalar, or (parts,) int64 for an objective with
        `part_weights`.
        """
        raise NotImplementedError

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: Any) -> Tensor:
        """Sum the loss over the targets, a float32 scalar.

        `states` (tokens, width) are the states after the last norm. `prepared` is a result of `prepare`. An
        objective with `part_weights` returns one sum for each part, (parts,) float32, over the targets of
        this part.
        """
        raise NotImplementedError

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: Any) -> Tensors:
        """Make the rows that a micro-batch adds to each table, (rows, width of the table) float32.

        A table has one slot for each cell of the global batch, and a cell has at most one row. The first
        number of a row must not be 0, because a row of zeros stands for an empty slot. If the second of
        three cells has no target:

            rows of the first micro-batch     [1, x] of cell 1
            rows of the second micro-batch    [1, x] of cell 3
            the table of three slots          [1, x] of cell 1, [1, x] of cell 3, zeros

        Training gathers the rows of all micro-batches in the tables. Then it sets the attribute `shares` of
        each result of `prepare` to a `RowShare` for each table, and `loss` adds `share.loss(rows)`. See
        `train.batch_rows`.
        """
        raise NotImplementedError

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        """Compute the loss of each table, summed over the rows of the table: one float scalar per table.

        A table is (slots, width). Rows of zeros are empty slots. The order of the rows has no effect.
        """
        raise NotImplementedError

    def observe(self, model: ObjectiveModel, prepared: Any) -> Tensors:
        """Return the tensors that `judge` compares, such as targets and predictions.

        Each tensor has one row per target, and `judge` gets the tensors of all batches concatenated. If the
        targets are tokens, the first tensor is the vocabulary row of each target's gene, (targets,) int64.
        """
        raise NotImplementedError

    def judged_labels(self) -> Mapping[str, Sequence[str]]:
        """Return the labels that the model knows, by obs column.

        `evaluate` leaves cells with other labels out of `judge`, and reports how many cells these are.
        """
        return {}

    def judge_observed(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Call `judge` with the observed targets. Without a target, return only `n_targets` of 0."""
        if observed and not len(observed[0]):
            return {"n_targets": 0}, []
        return self.judge(*observed, statistics=statistics)

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compute metrics of the observed targets, and verdicts against a baseline without a model.

        `observed` are the arrays of `observe`, with at least one target. Metric `n_targets` is the number of
        targets, which are counted in the same way as in training.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RowShare:
    """The share that a micro-batch has in the loss of a global batch, for one table of coupled rows.

    Once per step, before the micro-batches run, `train.batch_rows` computes the loss of the whole table
    (`Objective.loss_of_coupled_rows`) and its gradient.
    """

    value: Tensor  # float scalar: the loss, multiplied by the micro-batch's fraction of the rows
    gradient: Tensor
    """(rows, width) float32: the gradient of the loss with respect to the micro-batch's rows."""

    def loss(self, rows: Tensor) -> Tensor:
        """Return `value` as a float32 scalar that has `gradient` as its gradient with respect to `rows`."""
        # the difference below is 0, but its gradient with respect to `rows` is `gradient`
        product = (self.gradient * rows).sum()
        return (self.value + (product - product.detach())).float()


def value_loss(predicted: Tensor, values: Tensor, first_bin: int = 1) -> Tensor:
    """Sum the loss of predicted values, a float32 scalar.

    `values` (targets,) are the true values. If `predicted` is (targets,), the loss is the squared error. If
    `predicted` is (targets, bins), it is the logits of bins, and the loss is the cross-entropy. The first
    logit belongs to bin `first_bin`.
    """
    if predicted.ndim == 2:
        return F.cross_entropy(predicted, values - first_bin, reduction="sum")
    return (predicted - values).square().sum()


def expected_bins(logits: Tensor, first_bin: int = 1) -> Tensor:
    """Compute the mean bin under the predicted probabilities of bins, (targets,) float32.

    `logits` are (targets, bins), and the first logit belongs to bin `first_bin`.
    """
    bins = torch.arange(logits.shape[1], device=logits.device, dtype=logits.dtype)
    return logits.softmax(1) @ (bins + first_bin)


def r2_over(baseline_error: float, error: float) -> float | None:
    """Compute R² over a baseline from the squared errors of both; None if the baseline has no error."""
    return 1 - error / baseline_error if baseline_error > 0 else None


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Compute Pearson's correlation of `x` and `y`, (n,) float64 each; None if one of them is constant."""
    for values in (x, y):
        if values.var() <= MIN_VARIANCE_FRAC * np.square(values).mean():
            return None
    return float(np.corrcoef(x, y)[0, 1])


def cross_entropy_verdicts(name: str, baseline: str, difference: float) -> list[Verdict]:
    """Return the verdict on a difference of cross-entropies, model minus baseline.

    The model is better than the baseline if the difference is negative.
    """
    return [compare(name, baseline, "nats cross-entropy", difference, lower_is_better=True)]


def r2_verdicts(name: str, baseline: str, r2: float | None) -> list[Verdict]:
    """Return the verdict on an R² over a baseline; no verdict if the R² is undefined."""
    return [] if r2 is None else [compare(name, baseline, "R²", r2)]
