"""Names of interchangeable parts by kind, and the options class behind each (`cellmill.config.plugin`).

Built-ins are listed by module path, so listing or checking a name imports nothing. An installed package adds its own
through the entry-point group `cellmill.<kind>`; it never replaces a built-in.
"""

import importlib
from importlib.metadata import entry_points
from typing import Any

from cellmill.errors import ConfigError, did_you_mean

BUILT_IN: dict[str, dict[str, str]] = {
    "family": {"masked": "cellmill.models.masked.config:MaskedConfig"},
    "objective": {
        "masked_value": "cellmill.models.objectives.config:MaskedValueConfig",
        "masked_gene": "cellmill.models.objectives.config:MaskedGeneConfig",
    },
    "tokenizer": {
        "rank": "cellmill.config.tokens:RankTokens",
        "binned": "cellmill.config.tokens:BinnedTokens",
        "continuous": "cellmill.config.tokens:ContinuousTokens",
    },
    "task": {
        "probe": "cellmill.config.evaluate:ProbeConfig",
        "reconstruct": "cellmill.config.evaluate:ReconstructConfig",
    },
    "tracker": {},
    "method": {"full": "cellmill.config.finetune:FullConfig"},
}


def names(kind: str) -> list[str]:
    """Every available name of `kind`, built-ins first."""
    return [*BUILT_IN[kind], *(p.name for p in entry_points(group=f"cellmill.{kind}") if p.name not in BUILT_IN[kind])]


def load(kind: str, name: str) -> Any:
    """The options class called `name`. Raises ConfigError if no such name is built in or installed."""
    if name in BUILT_IN[kind]:
        return import_object(BUILT_IN[kind][name])
    for point in entry_points(group=f"cellmill.{kind}"):
        if point.name == name:
            try:
                return point.load()
            except Exception as error:  # of somebody else's package: whatever it is, the user has to know which
                package = point.dist.name if point.dist is not None else "an installed package"
                raise ConfigError(
                    f"{kind} {name!r}: {point.value} of {package} cannot be imported "
                    f"({type(error).__name__}: {error}); repair or remove the package"
                ) from None
    raise ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, names(kind))}")


def import_object(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
