"""sum: several objectives trained together. Each of these objectives is a part of the sum.

*Views and tokens.* At most one part draws a view, such as cell_decoding. The view is drawn first, and every
part then prepares its batch from this view. At most one part `owns_tokens`, such as masked_value. The model
is given the tokens of this part, so a token that is hidden for one part is hidden for all. Training runs
the model once for all parts. `observe` runs the model once per part.

*Second views.* With `view_loss` each cell has a second view, and the model is given the second views too.
Only the part that draws views reads the second views. To other parts they would be further cells.

*The loss* is a vector with one number per part, because the loss of each part is divided by the part's own
number of targets.
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
"""The fields of a batch that the model reads; the batches of all parts have the same tensors in them."""


@dataclass(frozen=True, kw_only=True)
class SumBatch(EncoderBatch):
    """The tokens that the model is given, and for each part a batch with the same tokens."""

    part_batches: tuple[Any, ...]  # the results of `prepare` of all parts, an EncoderBatch each
    n_targets: Tensor  # (parts,) int64: the number of targets of each part
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's shares of the losses that couple cells, in the order of the parts."""


class Sum(Objective):
    """Train several objectives together, from one run of the model."""

    config: SumConfig

    def __init__(self, config: SumConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.parts: dict[str, Objective] = {}  # by name
        self.part_weights: dict[str, float] = {}
        self.tensor_parallel_styles = {}
        has_view = any(options.draws_view for options in config.parts.values())
        for name, options in config.parts.items():
            part = options.load()(options, tokens)
            if type(part).view is not Objective.view and not options.draws_view:
                raise ConfigError(
                    f"objective.parts.{name}: it draws a view; its options class has to set draws_view"
                )
            part.in_view = has_view and not options.draws_view
            self.parts[name] = part
            self.part_weights[name] = options.weight  # type: ignore[attr-defined]
            self.tensor_parallel_styles |= part.tensor_parallel_styles
            self.gene_rows |= part.gene_rows

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add the heads of every part.

        Raise ConfigError if a head of a part replaces an attribute that the model already has, such as a
        head of another part.
        """
        names: tuple[str, ...] = ()
        for name, part in self.parts.items():
            attributes_before = _list_attributes(model)
            part.levels = self.levels
            part.number_columns = self.number_columns
            part.suffix = "" if name == part.config.name else f"_{name}"
            names += part.attach(model, vocab_size)
            _check_heads(name, attributes_before, _list_attributes(model))

        parts = self.parts.values()
        self.coupled_widths = tuple(width for part in parts for width in part.coupled_widths)
        self.validates_coupled_loss = any(part.validates_coupled_loss for part in parts)
        return tuple(dict.fromkeys(names))

    def parts_by_name(self) -> Mapping[str, Objective]:
        return self.parts

    def initial_value(self, name: str) -> Fill | None:
        for part in self.parts.values():
            value = part.initial_value(name)
            if value is not None:
                return value
        return None

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        for part in self.parts.values():
            batch = part.view(batch, seed=seed, step=step)
        return batch

    def prepare(self, batch: Batch, *, seed: int, step: int) -> SumBatch:
        """Prepare the batch of every part, and then give all these batches the same tokens."""
        first_views = batch
        if isinstance(batch, ViewBatch) and batch.n_second_views:
            # there are as many first views as second views, and the first views come first
            first_views = replace(batch.slice_cells(0, batch.n_second_views), n_second_views=0)

        part_batches: list[Any] = []
        for name, part in self.parts.items():
            part.training = self.training
            part_view = batch if part.config.draws_view else first_views
            part_batch = part.prepare(part_view, seed=seed, step=step)
            assert isinstance(part_batch, EncoderBatch), f"{name}: expected an EncoderBatch"
            part_batches.append(part_batch)

        model_fields = self._choose_model_fields(part_batches)
        return SumBatch(
            **model_fields,
            part_batches=tuple(replace(part_batch, **model_fields) for part_batch in part_batches),
            n_targets=torch.stack([part_batch.n_targets for part_batch in part_batches]),
        )

    def _choose_model_fields(self, part_batches: list[Any]) -> dict[str, Any]:
        """Choose the tokens that the model is given. Return the values of `MODEL_FIELDS`, by name.

        The tokens are the tokens of the part that `owns_tokens`, because no part may see the owner's
        targets. If no part owns tokens, all parts have the same tokens, and the first part stands for the
        owner.

        The second views are the second views of the part that `draws_view`. If no part draws views, there are
        no second views, and the first part stands for the drawer.
        """
        owner_batch = part_batches[0]
        drawer_batch = part_batches[0]
        for part, part_batch in zip(self.parts.values(), part_batches):
            if part.config.owns_tokens:
                owner_batch = part_batch
            if part.config.draws_view:
                drawer_batch = part_batch

        owner_fields = _read_model_fields(owner_batch)
        has_second_views = len(drawer_batch.lengths) > len(owner_batch.lengths)
        if has_second_views:
            return _replace_first_views(drawer_batch, owner_fields)
        return owner_fields

    def loss(self, model: ObjectiveModel, states: Tensor, prepared: SumBatch) -> Tensor:
        """Return the sum of the loss of each part over its own targets, (parts,) float32."""
        losses = []
        shares_by_part = self._split_by_part(prepared.shares or ())
        for part, part_batch, shares in zip(
            self.parts.values(), prepared.part_batches, shares_by_part
        ):
            # a part without `validates_coupled_loss` leaves its coupled loss out of validation
            uses_shares = model.training or part.validates_coupled_loss
            if shares and uses_shares:
                part_batch = replace(part_batch, shares=shares)
            losses.append(part.loss(model, states, part_batch).float())
        return torch.stack(losses)

    def coupled_rows(self, model: ObjectiveModel, states: Tensor, prepared: SumBatch) -> Tensors:
        rows: Tensors = ()
        for part, part_batch in zip(self.parts.values(), prepared.part_batches):
            if part.coupled_widths:
                rows += part.coupled_rows(model, states, part_batch)
        return rows

    def loss_of_coupled_rows(self, *tables: Tensor) -> Tensors:
        losses: Tensors = ()
        for part, part_tables in zip(self.parts.values(), self._split_by_part(tables)):
            if part_tables:
                losses += part.loss_of_coupled_rows(*part_tables)
        return losses

    def _split_by_part(self, items: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Split `items` by part. There is one item for each table of coupled rows.

        A part has one table for each number in its `coupled_widths`. Tables are in the order of the parts.
        """
        remaining = iter(items)
        return [tuple(islice(remaining, len(part.coupled_widths))) for part in self.parts.values()]

    def observe(self, model: ObjectiveModel, prepared: SumBatch) -> Tensors:
        """Return the number of tensors of each part, (parts,) int64, followed by all these tensors."""
        n_tensors = []
        observed: Tensors = ()
        for part, part_batch in zip(self.parts.values(), prepared.part_batches):
            tensors = part.observe(model, part_batch)
            n_tensors.append(len(tensors))
            observed += tensors
        return torch.tensor(n_tensors), *observed

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Judge every part. The metrics of a part get the name of the part as a prefix.

        If a part reads the view of another part, its baselines are computed from the tokens that views of
        training cells show.
        """
        repeated_n_arrays, *arrays = observed
        # the results of all batches are concatenated, so the numbers of arrays repeat in each batch
        n_arrays_of_parts = repeated_n_arrays[: len(self.parts)].tolist()

        metrics: dict[str, Any] = {}
        verdicts: list[Verdict] = []
        remaining = iter(arrays)
        for (name, part), n_arrays in zip(self.parts.items(), n_arrays_of_parts):
            part_statistics = statistics.shown if part.in_view else statistics
            assert part_statistics is not None, "statistics without views"
            part_metrics, part_verdicts = part.judge_observed(
                *islice(remaining, n_arrays), statistics=part_statistics
            )
            metrics |= {f"{name}.{key}": value for key, value in part_metrics.items()}
            verdicts += part_verdicts
        return metrics, verdicts


def _list_attributes(model: ObjectiveModel) -> Mapping[str, Any]:
    """Return the modules and the parameters that are attributes of `model` itself, by name."""
    return dict(model.named_children()) | dict(model.named_parameters(recurse=False))


def _check_heads(part: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise ConfigError if the method `attach` of `part` replaced an attribute of the model.

    `before` and `after` are the attributes of the model before and after the call of `attach`.
    """
    for head, module in sorted(after.items()):
        if before.get(head, module) is not module:
            raise ConfigError(
                f"objective.parts.{part}: the model already has an attribute {head}; leave this part out, or "
                "let its attach use another name"
            )


def _read_model_fields(batch: EncoderBatch) -> dict[str, Any]:
    """Return the values of the fields of `batch` that the model reads, by name."""
    return {name: getattr(batch, name) for name in MODEL_FIELDS}


def _replace_first_views(all_views: EncoderBatch, first_views: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the model reads, by name, with the first views replaced.

    `first_views` are the fields of the other first views, by name. A field is a tensor with a row per token
    or per cell:

        all_views     [first views | second views | padding]
        first_views   [first views, some tokens hidden]
        the result    [first views, some tokens hidden | second views | padding]

    The result has `cu_seqlens` and `lengths` of `all_views`, because hidden tokens are still in the batch.
    """
    replaced = _read_model_fields(all_views)
    for name, first in first_views.items():
        if isinstance(first, Tensor):
            replaced[name] = torch.cat([first, replaced[name][len(first) :]])
    return replaced
