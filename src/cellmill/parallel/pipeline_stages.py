"""A model in stages: which blocks each process of a pipeline has, and the model without the others.

Parameters keep the names they have in the whole model, so checkpoints, first weights and exports know no stages.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cellmill.parallel.materialize import plain_name
from cellmill.parallel.partition import blocks_of


class Stages(nn.Module):
    """The stages of this process, each a model without what others have.

    Parameters
    ----------
    parts
        Models (`cellmill.models.family.Model`) by the number of their stage.
    stages
        How many there are in all processes together.
    """

    def __init__(self, parts: dict[int, nn.Module], stages: int) -> None:
        super().__init__()
        self.numbers, self.parts = list(parts), nn.ModuleList(parts.values())
        self.first, self.last = parts.get(0), parts.get(stages - 1)
        self.tied = frozenset() if self.last is None else frozenset(id(p) for p in tied_parameters(self.last).values())
        """Identities of the last stage's copies: each is a parameter that the first stage already has."""

    def prepare(self, batch: object, *, seed: int, step: int) -> Any:
        """As `Model.prepare`, which reads no parameters: each stage draws the same."""
        part: Any = self.parts[0]
        return part.prepare(batch, seed=seed, step=step)


def keep_stage(model: nn.Module, stage: int, stages: int) -> None:
    """Removes what other stages have from the whole `model`, on the meta device. In place."""
    plan: Any = model.plan
    blocks = model.get_submodule(plan.blocks)
    kept_blocks = blocks_of(stage, stages, len(list(blocks.children())))
    for name in [name for name, _ in blocks.named_children() if int(name) not in kept_blocks]:
        blocks._modules.pop(name)  # del would number the others anew
    begin, finish = set(plan.begin), set(plan.finish)
    kept = (begin if stage == 0 else set()) | (finish if stage == stages - 1 else set())
    for name in (begin | finish) - kept:
        if hasattr(model, name):
            delattr(model, name)


def tied_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters, by name, that the first and the last stage, of which `part` is one, both have."""
    plan: Any = part.plan
    both = {*plan.begin} & {*plan.finish}
    return {plain_name(name): p for name, p in part.named_parameters() if name.split(".")[0] in both}
