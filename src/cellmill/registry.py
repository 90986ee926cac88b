"""Names that a configuration may use, by kind, and the class of options behind each (`cellmill.config.plugin`).

Built-ins are listed by module path, so that listing or checking a name imports nothing. An installed package adds its
own through the entry-point group `cellmill.<kind>`; it never replaces a built-in.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from cellmill.errors import ConfigError

BUILT_IN: dict[str, dict[str, str]] = {
    "family": {"masked": "cellmill.models.masked.config:MaskedConfig"},
    "objective": {
        "masked_value": "cellmill.models.objectives.config:MaskedValueConfig",
        "masked_gene": "cellmill.models.objectives.config:MaskedGeneConfig",
    },
    "method": {"full": "cellmill.config.finetune:FullConfig"},
}


def names(kind: str) -> list[str]:
    """Every known name of `kind`, built-ins first."""
    return [*BUILT_IN[kind], *(p.name for p in entry_points(group=f"cellmill.{kind}") if p.name not in BUILT_IN[kind])]


def load(kind: str, name: str) -> Any:
    """The object called `name`. Raises ConfigError listing what there is."""
    if name in BUILT_IN[kind]:
        module, attribute = BUILT_IN[kind][name].split(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=f"cellmill.{kind}"):
        if point.name == name:
            return point.load()
    raise ConfigError(f"no {kind} is called {name!r}; there are: {', '.join(names(kind))}")
