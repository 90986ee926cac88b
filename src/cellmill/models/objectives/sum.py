"""sum: several objectives at once, from one forward pass of the model.

The part that draws a view (cell_decoding) draws it first; then every part prepares on this view.
The model is given the batch of the part that hides tokens (masked_value), so that what is hidden
for one part is hidden for all. Second views of cells (`view_loss`) are given to the model too, but
only the part that draws them predicts from them: for others they would be further cells. The loss is
a vector, `(parts,)`, because each part is divided by its own number of targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellmill.config.parts.objectives import SumConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError
from cellmill.models.batch import EncoderBatch
from cellmill.models.initial import Fill
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    ObjectiveModel,
    RowShare,
    Tensors,
)
from cellmill.models.objectives.shared.views import ViewBatch
from cellmill.runs.results import Verdict

MODEL_FIELDS = [field.name for field in fields(EncoderBatch)]
"""Fields that the model reads: the same tensors in the batch of every part."""


@dataclass(frozen=True)
class SumBatch:
    """Batches that the parts prepared. Other attributes come from `model_batch`."""

    model_batch: Any  # the batch that the model is given
    part_batches: tuple[Any, ...]  # in the order of the parts
    n_targets: Tensor  # `(parts,)` int64
    shares: tuple[RowShare, ...] | None = None
    """Shares in losses of the global batch, in the order of the parts."""

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look attributes up before they are set; delegating them would recurse forever
        if name in self.__dataclass_fields__:
            raise AttributeError(name)
        return getattr(self.model_batch, name)


class Sum(Objective):
    config: SumConfig

    def __init__(self, config: SumConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.objectives: dict[str, Objective] = {}  # the parts by name
        self.part_weights: dict[str, float] = {}
        self.tensor_parallel_styles = {}
        for name, options in config.parts.items():
            part = options.load()(options, tokens)
            if type(part).view is not Objective.view and not options.draws_view:
                raise ConfigError(
                    f"objective.parts.{options.name}: it draws a view; its options class has to set draws_view"
                )
            self.objectives[name] = part
            self.part_weights[name] = options.weight  # type: ignore[attr-defined]
            self.tensor_parallel_styles |= part.tensor_parallel_styles
            self.gene_rows |= part.gene_rows

    def attach(self, model: ObjectiveModel, n_tokens: int) -> tuple[str, ...]:
        """Add the heads of every part. Raise ConfigError if two would have the same name."""
        names: dict[str, None] = {}  # an ordered set
        for name, part in self.objectives.items():
            attributes_before = _list_attributes(model)
            part.levels = self.levels
            part.number_columns = self.number_columns
            part.suffix = "" if name == part.config.name else f"_{name}"
            names |= dict.fromkeys(part.attach(model, n_tokens))
            for head, module in sorted(_list_attributes(model).items()):
                if attributes_before.get(head, module) is not module:
                    raise ConfigError(
                        f"objective.parts.{name}: its head {head} has the name of another part's; leave one of them out"
                    )
            self.row_widths += part.row_widths
            self.validates_rows |= part.validates_rows
        return tuple(names)

    def leaves(self) -> Mapping[str, Objective]:
        return self.objectives

    def initial_value(self, name: str) -> Fill | None:
        for part in self.objectives.values():
            value = part.initial_value(name)
            if value is not None:
                return value
        return None

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        for part in self.objectives.values():
            batch = part.view(batch, seed=seed, step=step)
        return batch

    def prepare(self, batch: Batch, *, seed: int, step: int) -> SumBatch:
        """Prepare every part; the model is given the batch of the part that hides tokens."""
        has_second_views = False
        first_views = batch
        if isinstance(batch, ViewBatch) and batch.n_paired:
            has_second_views = True
            first_views = replace(batch.cut(0, batch.n_paired), n_paired=0)
        part_batches = self._prepare_parts(batch, first_views, seed, step)
        model_batch = self._choose_model_batch(part_batches, has_second_views)
        n_targets = torch.stack([part_batch.n_targets for part_batch in part_batches])
        return SumBatch(model_batch, _replace_tokens(part_batches, model_batch), n_targets)

    def _prepare_parts(self, batch: Batch, first_views: Batch, seed: int, step: int) -> list[Any]:
        """Prepare the batch of each part; only the part that draws the view reads second views."""
        part_batches = []
        for part in self.objectives.values():
            part.training = self.training
            part_view = batch if part.config.draws_view else first_views
            part_batches.append(part.prepare(part_view, seed=seed, step=step))
        return part_batches

    def _choose_model_batch(self, part_batches: list[Any], has_second_views: bool) -> Any:
        """Choose the batch that the model is given.

        - A part hides tokens: its batch, since no part may see its targets.
        - The same, and there are second views: its batch, and the second views appended.
        - No part hides tokens, and there are second views: the batch of the part that drew them.
        - Neither: the first part's, since all have the same tokens.
        """
        hiding_batch: Any = None  # of the part that hides tokens, if there is one
        view_batch: Any = None  # of the part that draws the view, if there is one
        for part, part_batch in zip(self.objectives.values(), part_batches):
            if part.config.hides_tokens:
                hiding_batch = part_batch
            if part.config.draws_view:
                view_batch = part_batch
        if hiding_batch is None:
            return view_batch if has_second_views else part_batches[0]
        if has_second_views:
            return _add_second_views(hiding_batch, view_batch)
        return hiding_batch

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: SumBatch) -> Tensor:
        all_shares = iter(prepared.shares or ())
        losses = []
        for part, part_batch in zip(self.objectives.values(), prepared.part_batches):
            shares = tuple(islice(all_shares, len(part.row_widths)))
            if shares and (model.training or part.validates_rows):
                part_batch = replace(part_batch, shares=shares)
            losses.append(part.loss(model, states, part_batch).float())
        return torch.stack(losses)

    def rows(self, model: ObjectiveModel, states: Tensor, prepared: SumBatch) -> Tensors:
        rows: Tensors = ()
        for part, part_batch in zip(self.objectives.values(), prepared.part_batches):
            if part.row_widths:
                rows += part.rows(model, states, part_batch)
        return rows

    def loss_of_rows(self, *tables: Tensor) -> Tensors:
        all_tables = iter(tables)
        losses: Tensors = ()
        for part in self.objectives.values():
            if part.row_widths:
                losses += part.loss_of_rows(*islice(all_tables, len(part.row_widths)))
        return losses

    def observe(self, model: ObjectiveModel, prepared: SumBatch) -> Tensors:
        """Observe every part: the number of its tensors, `(parts,)` int64, then these tensors."""
        sizes = []
        observed: Tensors = ()
        for part, part_batch in zip(self.objectives.values(), prepared.part_batches):
            tensors = part.observe(model, part_batch)
            sizes.append(len(tensors))
            observed += tensors
        return torch.tensor(sizes), *observed

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        metrics = dict[str, Any]()
        verdicts = list[Verdict]()
        sizes, *arrays = observed
        all_arrays = iter(arrays)
        for (name, part), size in zip(self.objectives.items(), sizes.tolist()):
            part_metrics, part_verdicts = part.judge(*islice(all_arrays, size), train=train)
            metrics |= {f"{name}.{key}": value for key, value in part_metrics.items()}
            verdicts += part_verdicts
        return metrics, verdicts


def _list_attributes(model: ObjectiveModel) -> Mapping[str, Any]:
    """List the children and the direct parameters of `model` by name."""
    return {**dict(model.named_children()), **dict(model.named_parameters(recurse=False))}


def _replace_tokens(part_batches: list[Any], model_batch: Any) -> tuple[Any, ...]:
    """Replace the tokens of the parts' batches by those of `model_batch`.

    So nothing is hidden for one part and shown to another.
    """
    if not isinstance(model_batch, EncoderBatch):
        return tuple(part_batches)
    tokens = {name: getattr(model_batch, name) for name in MODEL_FIELDS}
    replaced = []
    for part_batch in part_batches:
        reads_tokens = isinstance(part_batch, EncoderBatch)
        replaced.append(replace(part_batch, **tokens) if reads_tokens else part_batch)
    return tuple(replaced)


def _add_second_views(first_views: Any, all_views: Any) -> Any:
    """Append the second views, the rest of `all_views`, to `first_views`."""
    joined = {}
    for name in MODEL_FIELDS:
        first = getattr(first_views, name)
        joined[name] = getattr(all_views, name)
        if isinstance(first, Tensor):
            joined[name] = torch.cat([first, joined[name][len(first) :]])
        elif isinstance(first, list):
            joined[name] = [*first, *joined[name][len(first) :]]
    return replace(first_views, **joined)
