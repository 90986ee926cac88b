"""Exponential moving average of the trained weights, which validation and exports take in their place.

After each optimizer step, average = d * average + (1 - d) * weights, d = min(ema_decay, (1 + t) / (10 + t)) after t
earlier steps: the first weights are forgotten soon. A skipped step averages the same weights again. Frozen weights are
their own average and have none here.

The average is float32 and laid out as the weights are, so it communicates nothing and is the same in every layout.
Source: Polyak & Juditsky 1992; the warm-up is that of TensorFlow's ExponentialMovingAverage.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cellmill.parallel.fsdp import reshard
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.torch_private import move_all


class WeightAverage:
    """Average of the parameters of `model` that require a gradient; begins with their values.

    Parameters
    ----------
    model
        What this rank holds, after `materialize`: the model, or the `PipelineStages` of a pipeline.
    decay
        `train.ema_decay`.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        trained = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
        self._parts = [(name, parameter, parameter.detach().clone()) for name, parameter in trained]

    def update(self, step: int) -> None:
        """Move towards the weights after step `step`, from 0. No communication."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        if self._parts:
            _, weights, averages = zip(*self._parts)
            move_all([*map(_local, averages)], [*map(_local, weights)], share)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average by plain name, not copied; of a tied parameter that this rank has twice the last one."""
        return {name: average for name, _, average in self._parts}

    @torch.no_grad()
    def fill_tied_copies(self) -> None:
        """Copy what was loaded into `tensors` to the other copy of a tied parameter that this rank has twice."""
        loaded = self.tensors()
        for name, _, average in self._parts:
            if loaded[name] is not average:
                average.copy_(loaded[name])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the average for a while; its weights come back bit for bit. No communication."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # weights that a forward pass left gathered would be those of before
        for _, parameter, average in self._parts:
            own, other = _local(parameter), _local(average)
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard. Not cached: FSDP2 moves it in memory before its first forward pass."""
    own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()
