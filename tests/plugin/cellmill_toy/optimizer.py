"""Gradient descent with momentum; the host waits at each step, to skip one whose gradients are not
finite.
"""

from typing import Any

import torch

from cellmill.config.run import Train


class Momentum(torch.optim.Optimizer):
    """Steps along a moving average of the gradients."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        super().__init__(groups, {"lr": train.lr, "weight_decay": 0.0})
        self.decay: float = train.optimizer.decay  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step over all parameters with a gradient."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(self.decay).add_(parameter.grad, alpha=1 - self.decay)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    state["momentum"], alpha=group["lr"]
                )
