"""Options that an earlier version stored, in checkpoints, run.json and exported models, as this version has them.

Torch-free. What a user writes is never upgraded silently: an old key in a configuration is an error that names its new
place.
"""

from __future__ import annotations

from typing import Any

OBJECTIVE_KEYS = ("mask_frac", "cell_loss_weight")
"""Of the section `model` until 0.1.0."""


def upgrade_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved sections of a run as this version stores them; sections that are not there stay away."""
    options = dict(options)
    model = dict(options.get("model", {}))
    if "objective" in model:
        objective = {"name": model.pop("objective")}
        options["objective"] = objective | {key: model.pop(key) for key in OBJECTIVE_KEYS if key in model}
        options["model"] = model
    return options
