"""full: every parameter trains, the trunk at a rate that may fall with depth and from a step on that may do so too.

Rates fall from block to block as in Howard & Ruder 2018 (ULMFiT, discriminative fine-tuning), and so does gradual
unfreezing there, by epochs.
"""

from cellmill.config.finetune import FullConfig
from cellmill.finetune.depth import Depth
from cellmill.finetune.method import Method
from cellmill.models.family import Model


class Full(Method):
    """See the module."""

    config: FullConfig
    depth: Depth

    def transform(self, model: Model) -> None:
        """Change nothing: only look at the model."""
        self.depth = Depth.of(model)

    def group(self, name: str) -> dict[str, float]:
        """Scale the rate of the trunk."""
        if self.depth.is_head(name):
            return {}
        below = self.depth.n_blocks - self.depth.level(name)
        return {"lr_scale": self.config.trunk_lr_frac * self.config.layer_decay**below}

    def first_step(self, name: str) -> int:
        """Return when a parameter of the trunk begins to train."""
        if self.depth.is_head(name):
            return 0
        below = self.depth.n_blocks - self.depth.level(name)
        return self.config.head_steps + self.config.block_steps * below
