"""torch's schedules of a run, one for each number and length of micro-batches, which fix the shapes of its buffers.

A schedule that is made anew asks all its pipeline stages for their shapes by point-to-point messages before its first
step. The schedules of a run are therefore kept, and lengths come from a small set (`config.parallel.pipeline_tokens`).
Only the one in use has receive buffers, which are the memory of a schedule: those of another length are made again
when it is used again, which is an allocation. From torch 2.15 on it keeps none between steps, and this frees nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

Key = tuple[int, int]
"""Number of micro-batches, and tokens of each."""


@dataclass
class _Made:
    """A schedule and the stages of this rank in it."""

    schedule: Any
    stages: Sequence[PipelineStage]
    shapes: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """While it is not in use: what had a receive buffer, and the buffer's like on the meta device."""

    def release(self) -> None:
        """Free the receive buffers."""
        for received in self._received():
            buffer = received.buffer
            self.shapes.append((received, buffer.detach().to("meta").requires_grad_(buffer.requires_grad)))
            received.buffer = None

    def restore(self, device: torch.device) -> None:
        """Allocate them again."""
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

    def __init__(self, make: Callable[[int, int], tuple[Any, Sequence[PipelineStage]]], device: torch.device) -> None:
        self._make, self._device = make, device
        self._made: dict[Key, _Made] = {}
        self._in_use: _Made | None = None

    def __len__(self) -> int:
        """Return the number of schedules made so far."""
        return len(self._made)

    def of(self, micro_batches: int, tokens: int) -> Any:
        """Return torch's schedule of steps with this number of micro-batches, of `tokens` tokens each."""
        found = self._made.get((micro_batches, tokens))
        if found is not None and found is self._in_use:
            return found.schedule
        if self._in_use is not None:
            self._in_use.release()
        if found is None:
            found = self._made[micro_batches, tokens] = _Made(*self._make(micro_batches, tokens))
        found.restore(self._device)
        self._in_use = found
        return found.schedule
