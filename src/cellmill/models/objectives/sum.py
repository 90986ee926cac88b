"""sum: several objectives at once, from one forward pass of the model.

The part that draws a view (cell_decoding) draws it first; then every part prepares on this view.
The model is given the batch of the part that hides tokens (masked_value), so that what is hidden
for one part is hidden for all. Second views of cells (`view_loss`) are given to the model too, but
only the part that draws them sees them: for others they would be more cells to predict. The loss is
a vector, (parts,), because each part is divided by its own number of targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from cellmill.config.parts.objectives import SumConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError
from cellmill.models.batch import EncoderBatch
from cellmill.models.initial import Fill
from cellmill.models.objective import GeneStatistics, Objective, RowShare
from cellmill.models.objectives.views import ViewBatch
from cellmill.runs.verdict import Verdict

SHARED = [field.name for field in fields(EncoderBatch)]
"""What the model is given: the same tensors in the batch of every part."""


@dataclass(frozen=True)
class SumBatch:
    """Batches prepared by each part; it has the attributes of the batch that the model is given."""

    given: Any
    parts: tuple[Any, ...]
    n_targets: torch.Tensor  # (parts,) int64
    # shares in losses of the global batch, those of one part after another
    shares: tuple[RowShare, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "parts", "n_targets", "shares"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.given, name)


class Sum(Objective):
    config: SumConfig

    def __init__(self, config: SumConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.each: dict[str, Objective] = {
            name: part.load()(part, tokens) for name, part in config.parts.items()
        }
        for part in self.each.values():
            if type(part).view is not Objective.view and not part.config.draws_view:
                raise ConfigError(
                    f"objective.parts.{part.config.name}: it draws a view; its options class has to set draws_view"
                )
        self.parts = {name: part.config.weight for name, part in self.each.items()}  # type: ignore[attr-defined]
        self.tensor = {
            path: style for part in self.each.values() for path, style in part.tensor.items()
        }
        self.gene_rows = frozenset(name for part in self.each.values() for name in part.gene_rows)

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add the heads of every part. Raises ConfigError where two would have one name."""
        names: dict[str, None] = {}
        for name, part in self.each.items():
            before = _attributes(model)
            part.levels = self.levels
            part.number_columns = self.number_columns
            part.suffix = "" if name == part.config.name else f"_{name}"
            names |= dict.fromkeys(part.attach(model, n_tokens))
            taken = sorted(
                head for head, own in _attributes(model).items() if before.get(head, own) is not own
            )
            if taken:
                raise ConfigError(
                    f"objective.parts.{name}: its head {taken[0]} has the name of another part's; leave one of them out"
                )
        self.row_widths = tuple(width for part in self.each.values() for width in part.row_widths)
        self.validates_rows = any(part.validates_rows for part in self.each.values())
        return tuple(names)

    def leaves(self) -> Mapping[str, Objective]:
        return self.each

    def initial_value(self, name: str) -> Fill | None:
        values = (part.initial_value(name) for part in self.each.values())
        return next((value for value in values if value is not None), None)

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        for part in self.each.values():
            batch = part.view(batch, seed=seed, step=step)
        return batch

    def prepare(self, batch: Batch, *, seed: int, step: int) -> SumBatch:
        """Prepare every part; the model is given the batch of the part that hides tokens."""
        first = batch
        parts = list(self.each.values())
        if isinstance(batch, ViewBatch) and batch.paired:  # without second views and padding
            first = replace(batch.cut(0, batch.paired), paired=0)
        for part in parts:
            part.training = self.training
        prepared = [
            part.prepare(batch if part.config.draws_view else first, seed=seed, step=step)
            for part in parts
        ]
        hiding = next((own for own, part in zip(prepared, parts) if part.config.hides_tokens), None)
        given = prepared[0] if hiding is None else hiding
        if first is not batch:
            drawn = next(own for own, part in zip(prepared, parts) if part.config.draws_view)
            given = drawn if hiding is None else _with_second_views(hiding, drawn)
        if isinstance(given, EncoderBatch):  # nothing is hidden for one part and shown to another
            shared = {name: getattr(given, name) for name in SHARED}
            prepared = [
                replace(own, **shared) if isinstance(own, EncoderBatch) else own for own in prepared
            ]
        return SumBatch(given, tuple(prepared), torch.stack([own.n_targets for own in prepared]))

    def loss(self, model: Any, states: torch.Tensor, prepared: SumBatch) -> torch.Tensor:
        left = iter(prepared.shares or ())
        losses = []
        for part, own in zip(self.each.values(), prepared.parts):
            shares = tuple(islice(left, len(part.row_widths)))
            if shares and (model.training or part.validates_rows):
                own = replace(own, shares=shares)
            losses.append(part.loss(model, states, own).float())
        return torch.stack(losses)

    def rows(
        self, model: Any, states: torch.Tensor, prepared: SumBatch
    ) -> tuple[torch.Tensor, ...]:
        pairs = zip(self.each.values(), prepared.parts)
        return tuple(
            rows for part, own in pairs if part.row_widths for rows in part.rows(model, states, own)
        )

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(tables)
        losses = list[torch.Tensor]()
        for part in self.each.values():
            if part.row_widths:
                losses += part.loss_of_rows(*islice(left, len(part.row_widths)))
        return tuple(losses)

    def observe(self, model: Any, prepared: SumBatch) -> tuple[torch.Tensor, ...]:
        """Return the number of tensors of each part, (parts,) int64, and then the tensors."""
        observed = [
            part.observe(model, own) for part, own in zip(self.each.values(), prepared.parts)
        ]
        return torch.tensor([len(tensors) for tensors in observed]), *(
            x for tensors in observed for x in tensors
        )

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        metrics = dict[str, Any]()
        verdicts = list[Verdict]()
        rest = iter(observed[1:])
        for (name, part), size in zip(self.each.items(), observed[0].tolist()):
            judged, said = part.judge(*islice(rest, size), train=train)
            metrics |= {f"{name}.{key}": value for key, value in judged.items()}
            verdicts += said
        return metrics, verdicts


def _attributes(model: Any) -> Mapping[str, Any]:
    return {**dict(model.named_children()), **dict(model.named_parameters(recurse=False))}


def _with_second_views(hiding: Any, drawn: Any) -> Any:
    """Batch `hiding`, of first views, followed by the second views that `drawn` has behind them."""

    def followed(first: Any, both: Any) -> Any:
        if isinstance(both, torch.Tensor):
            return torch.cat([first, both[len(first) :]])
        return [*first, *both[len(first) :]] if isinstance(both, list) else both

    return replace(
        hiding, **{name: followed(getattr(hiding, name), getattr(drawn, name)) for name in SHARED}
    )
