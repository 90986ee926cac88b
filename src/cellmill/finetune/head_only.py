"""head_only: the objective's heads train, on vectors of a trunk that stays as it is."""

from cellmill.finetune.depth import Depth
from cellmill.finetune.method import Method
from cellmill.models.family import Model


class HeadOnly(Method):
    """See the module."""

    depth: Depth

    def transform(self, model: Model) -> None:
        """Change nothing: only look at the model."""
        self.depth = Depth.of(model)

    def trains(self, name: str) -> bool:
        """Return whether a parameter belongs to a head."""
        return self.depth.is_head(name)
