"""Pipeline stages of a model: assignment to ranks, the parts that this rank holds, and tied parameters.

Parameters keep the names of the whole model, so checkpoints, initial weights and exports do not depend on stages.

Source: PipeDream and Megatron-LM, Narayanan et al. 2021, section 2.2 (interleaved stages); zero bubble, Qi et al. 2024,
section 6 (V shape: the first and the last stage share a rank).
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cellmill.config.parallel import Parallel
from cellmill.parallel.materialize import plain_name

V_SHAPED = ("ZBV", "DualPipeV")


def stages_of(rank: int, parallel: Parallel) -> list[int]:
    """Return the pipeline stages of pipeline rank `rank`, ascending."""
    if parallel.stages == parallel.pp:
        return [rank]
    second = parallel.stages - 1 - rank if parallel.schedule in V_SHAPED else rank + parallel.pp
    return [rank, second]


def blocks_of(stage: int, stages: int, blocks: int) -> range:
    """Return the blocks of a stage. The remainder goes to the middle: the ends hold the embedding and the loss."""
    quotient, remainder = divmod(blocks, stages)
    sizes = [quotient + (1 <= number <= remainder) for number in range(stages)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


class PipelineStages(nn.Module):
    """The pipeline stages of this rank by number, of `stages` in all: models without the modules of other stages."""

    def __init__(self, parts: Mapping[int, nn.Module], stages: int) -> None:
        super().__init__()
        self.numbers, self.parts = list(parts), nn.ModuleList(parts.values())
        self.first, self.last = parts.get(0), parts.get(stages - 1)
        self.tied = frozenset() if self.last is None else frozenset(id(p) for p in tied_parameters(self.last).values())
        """Identities of the last stage's copies of tied parameters; the first stage counts them in norms."""

    @property
    def objective(self) -> Any:
        return self.parts[0].objective

    def view(self, batch: object, *, seed: int, step: int) -> Any:
        return any_part(self).view(batch, seed=seed, step=step)

    def prepare(self, batch: object, *, seed: int, step: int) -> Any:
        """Call `Model.prepare`, which reads no parameters: every stage draws the same."""
        return any_part(self).prepare(batch, seed=seed, step=step)


def any_part(model: nn.Module) -> Any:
    """Return a part of the model that this rank holds: each has the plan and the objective."""
    return model.parts[0] if isinstance(model, PipelineStages) else model


def last_part(model: nn.Module) -> Any:
    """Return the part that computes the loss; None on other ranks of a pipeline."""
    return model.last if isinstance(model, PipelineStages) else model


def keep_stage(model: nn.Module, stage: int, stages: int) -> None:
    """Remove from the whole `model` what other stages hold. In place, on the meta device."""
    plan: Any = model.plan
    blocks = model.get_submodule(plan.blocks)
    kept_blocks = blocks_of(stage, stages, len(list(blocks.children())))
    for name in [name for name, _ in blocks.named_children() if int(name) not in kept_blocks]:
        delattr(blocks, name)  # del blocks[i] would renumber the others
    kept = {*(plan.begin if stage == 0 else ()), *(plan.finish if stage == stages - 1 else ())}
    for name in {*plan.begin, *plan.finish} - kept:
        if hasattr(model, name):
            delattr(model, name)


def tied_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by plain name, the parameters that both ends of the pipeline hold; `part` is one of the ends."""
    plan: Any = part.plan
    both = {*plan.begin} & {*plan.finish}
    return {plain_name(name): p for name, p in part.named_parameters() if name.split(".")[0] in both}
