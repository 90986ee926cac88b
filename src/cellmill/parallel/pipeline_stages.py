"""Pipeline stages of a model: the parts that this rank holds, and the tied parameters of the first and last stage.

Parameters keep the names of the whole model, so checkpoints, initial weights and exports do not depend on stages.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cellmill.parallel.materialize import plain_name
from cellmill.parallel.stage_assignment import blocks_of


class PipelineStages(nn.Module):
    """The pipeline stages of this rank, each a model without the modules of other stages.

    Parameters
    ----------
    parts
        Models (`cellmill.models.family.Model`) by stage number.
    stages
        Number of stages over all ranks.
    """

    def __init__(self, parts: Mapping[int, nn.Module], stages: int) -> None:
        super().__init__()
        self.numbers, self.parts = list(parts), nn.ModuleList(parts.values())
        self.first, self.last = parts.get(0), parts.get(stages - 1)
        self.tied = frozenset() if self.last is None else frozenset(id(p) for p in tied_parameters(self.last).values())
        """Identities of the last stage's copies of tied parameters; the first stage counts them in norms."""

    @property
    def objective(self) -> Any:
        """The objective of the model."""
        return self.parts[0].objective

    def view(self, batch: object, *, seed: int, step: int) -> Any:
        """Call `Model.view`, as `prepare`."""
        part: Any = self.parts[0]
        return part.view(batch, seed=seed, step=step)

    def prepare(self, batch: object, *, seed: int, step: int) -> Any:
        """Call `Model.prepare`, which reads no parameters: every stage draws the same."""
        part: Any = self.parts[0]
        return part.prepare(batch, seed=seed, step=step)


def keep_stage(model: nn.Module, stage: int, stages: int) -> None:
    """Remove from the whole `model` what other stages hold. In place, on the meta device."""
    plan: Any = model.plan
    blocks = model.get_submodule(plan.blocks)
    kept_blocks = blocks_of(stage, stages, len(list(blocks.children())))
    for name in [name for name, _ in blocks.named_children() if int(name) not in kept_blocks]:
        delattr(blocks, name)  # del blocks[i] would renumber the others
    begin, finish = set(plan.begin), set(plan.finish)
    kept = (begin if stage == 0 else set()) | (finish if stage == stages - 1 else set())
    for name in (begin | finish) - kept:
        if hasattr(model, name):
            delattr(model, name)


def tied_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by plain name, the parameters that both ends of the pipeline hold; `part` is one of the ends."""
    plan: Any = part.plan
    both = {*plan.begin} & {*plan.finish}
    return {plain_name(name): p for name, p in part.named_parameters() if name.split(".")[0] in both}
