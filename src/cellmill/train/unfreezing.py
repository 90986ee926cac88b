"""Parameters that begin to train after the first step: until then their gradients are dropped.

They are not frozen, since DistributedDataParallel and FSDP2 record at the start what requires a gradient. Without a
gradient the optimizer leaves a parameter and its state as they are, and the gradient norm is that of the others.
"""

from collections.abc import Callable

from torch import nn

from cellmill.parallel.materialize import plain_name


class Unfreezing:
    """First steps of the parameters that a rank holds.

    Parameters
    ----------
    model
        What this rank holds: the model, or the `PipelineStages` of a pipeline, after `parallelize`.
    first_step
        The first step of a parameter by plain name, from 0: `Method.first_step`.
    """

    def __init__(self, model: nn.Module, first_step: Callable[[str], int]) -> None:
        steps = {name: first_step(plain_name(name)) for name, p in model.named_parameters() if p.requires_grad}
        self.later = {name: step for name, step in steps.items() if step > 0}

    def drop_gradients(self, model: nn.Module, step: int) -> None:
        """Drop gradients of what does not train yet in step `step`, from 0. No communication."""
        if step >= max(self.later.values(), default=0):
            return
        for name, parameter in model.named_parameters():
            if self.later.get(name, 0) > step:
                parameter.grad = None
