"""partial: the last blocks train with the norm behind them and the heads; all before them is frozen."""

from cellmill.config.finetune import PartialConfig
from cellmill.finetune.depth import Depth
from cellmill.finetune.method import Method
from cellmill.models.family import Model


class Partial(Method):
    """See the module."""

    config: PartialConfig
    depth: Depth

    def transform(self, model: Model) -> None:
        """Change nothing: only look at the model."""
        self.depth = Depth.of(model)

    def trains(self, name: str) -> bool:
        """Return whether a parameter belongs to a head or is at the depth of the last blocks."""
        if self.depth.is_head(name):
            return True
        frozen_blocks = max(0, self.depth.n_blocks - self.config.last_blocks)
        return self.depth.level(name) > frozen_blocks

    def group(self, name: str) -> dict[str, float]:
        """Scale the rate of the trunk."""
        return {} if self.depth.is_head(name) else {"lr_scale": self.config.trunk_lr_frac}
