"""Depth of a parameter in a model, by its plain name: below the blocks, in one of them, behind them, or in a head."""

from dataclasses import dataclass
from typing import Self

from cellmill.models.family import Model


@dataclass(frozen=True)
class Depth:
    """Names that tell the trunk from the heads, and the number of blocks."""

    heads: frozenset[str]
    """Modules and parameters of the model that the objective added."""
    behind: frozenset[str]
    """Paths of modules and parameters of the trunk behind the blocks, such as the last norm."""
    blocks: str
    n_blocks: int

    @classmethod
    def of(cls, model: Model) -> Self:
        """Return the depth of a whole model."""
        plan, heads = model.plan, frozenset(model.heads or ())
        return cls(heads, model.behind_blocks(), plan.blocks, len(list(model.get_submodule(plan.blocks).children())))

    def is_head(self, name: str) -> bool:
        """Return whether a parameter belongs to a head."""
        return name.split(".")[0] in self.heads

    def level(self, name: str) -> int:
        """Return 0 before the blocks, as for embeddings, i + 1 in block i, and the last block's behind the blocks."""
        if name.startswith(f"{self.blocks}."):
            return 1 + int(name.removeprefix(f"{self.blocks}.").split(".")[0])
        is_behind = any(name == path or name.startswith(f"{path}.") for path in self.behind)
        return self.n_blocks if is_behind else 0
