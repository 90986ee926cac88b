"""Options stored by an earlier version, in today's form.

A run's resolved options are stored in its run.json and in each checkpoint's state.json. A version that moves or
renames an option translates it in `upgrade_options`; an option added with a default needs nothing here, because
validation fills it in.
"""

from __future__ import annotations

from typing import Any

from cellmill.config.load import check_options
from cellmill.config.options import TrainOptions


def upgrade_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return stored options with every section and key under its present name."""
    return options


def stored_options(options: dict[str, Any], source: str) -> TrainOptions:
    """Parse the options stored in `source`. Raises ConfigError if this version cannot read them."""
    parsed: TrainOptions = check_options(TrainOptions, upgrade_options(options), source)
    return parsed
