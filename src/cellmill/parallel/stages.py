"""Pipeline stages of a model: assignment to ranks, the parts that this rank holds, tied parameters, and schedules.

Parameters keep the names of the whole model, so checkpoints, initial weights and exports do not depend on stages.

There is one torch schedule for each number and length of micro-batches, which fix the shapes of its buffers. A new
schedule exchanges shapes between all stages by point-to-point messages before its first step. The schedules of a run
are therefore kept, and lengths come from a small set (`config.parallel.pipeline_tokens`). Only the one in use has
receive buffers, which are the memory of a schedule; another length allocates its own again when it is used. From torch
2.15 on a schedule keeps no buffers between steps, and this frees nothing.

Source: PipeDream and Megatron-LM, Narayanan et al. 2021, section 2.2 (interleaved stages); zero bubble, Qi et al. 2024,
section 6 (V shape: the first and the last stage share a rank).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cellmill.config.parallel import Parallel
from cellmill.parallel.materialize import plain_name

if TYPE_CHECKING:  # it takes half a second to import, which only a pipeline needs (`parallel.pipeline`)
    from torch.distributed.pipelining import PipelineStage

Key = tuple[int, int]  # number of micro-batches, and tokens of each


@dataclass
class _Made:
    """A schedule and the stages of this rank in it."""

    schedule: Any
    stages: Sequence["PipelineStage"]
    shapes: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """While it is not in use: what had a receive buffer, and the buffer's like on the meta device."""

    def release(self) -> None:
        for received in self._received():
            buffer = received.buffer
            self.shapes.append((received, buffer.detach().to("meta").requires_grad_(buffer.requires_grad)))
            received.buffer = None

    def restore(self, device: torch.device) -> None:
        for received, like in self.shapes:
            # torch 2.11 marks the buffer of an activation when the schedule is made, later versions in each step
            received.buffer = torch.empty_like(like, device=device).requires_grad_(like.requires_grad)
        self.shapes.clear()

    def _received(self) -> Iterator[Any]:
        for stage in self.stages:
            for by_micro_batch in (stage.args_recv_info, stage.grad_recv_info):
                for received in (one for several in by_micro_batch.values() for one in several):
                    if getattr(received, "buffer", None) is not None:
                        yield received


class Schedules:
    """Schedules by key; `make` returns one and this rank's stages in it. Ranks of a pipeline ask for the same keys."""

    def __init__(self, make: Callable[[int, int], tuple[Any, Sequence["PipelineStage"]]], device: torch.device) -> None:
        self._make, self._device = make, device
        self._made: dict[Key, _Made] = {}
        self._in_use: _Made | None = None

    def __len__(self) -> int:
        return len(self._made)

    def of(self, micro_batches: int, tokens: int) -> Any:
        """Return torch's schedule of steps with this number of micro-batches, of `tokens` tokens each."""
        found = self._made.get((micro_batches, tokens))
        if found is None or found is not self._in_use:
            if self._in_use is not None:
                self._in_use.release()
            if found is None:
                found = self._made[micro_batches, tokens] = _Made(*self._make(micro_batches, tokens))
            found.restore(self._device)
            self._in_use = found
        return found.schedule


V_SHAPED = ("ZBV", "DualPipeV")


def stages_of(rank: int, parallel: Parallel) -> list[int]:
    """Return the pipeline stages of pipeline rank `rank`, ascending."""
    if parallel.stages == parallel.pp:
        return [rank]
    second = parallel.stages - 1 - rank if parallel.schedule in V_SHAPED else rank + parallel.pp
    return [rank, second]


def process_of(stage: int, parallel: Parallel) -> int:
    """Return the pipeline rank that holds `stage`."""
    return next(rank for rank in range(parallel.pp) if stage in stages_of(rank, parallel))


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
