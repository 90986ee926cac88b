"""A fine-tuning in the pool's processes, and what it did to every parameter."""

from __future__ import annotations

from typing import Any

from torch import nn

from cellmill.parallel.materialize import plain_name
from tests.distributed import cases


def tuned(corpus: str, options: dict[str, Any], folder: str, steps: int, load: bool = False) -> dict[str, Any]:
    """[loss, gradient norm] of each step, this rank's parameters before and after, and what each group trains."""
    made, lines = cases.trainer(corpus, options, folder, steps)
    before = _parameters(made.model)
    if load:
        made.resume()
    made.run()
    made.close()
    names = {id(parameter): plain_name(name) for name, parameter in made.model.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g["weight_decay"], g["lr"]) for g in made.optimizer.param_groups]
    return {
        "rates": [{key: line[key] for key in line if key.startswith("lr_")} for line in lines.lines if "loss" in line],
        "curve": cases.losses_and_norms(lines),
        "before": before,
        "after": _parameters(made.model),
        "groups": groups,
        "with gradient": {plain_name(name) for name, p in made.model.named_parameters() if p.requires_grad},
        "states": {names[id(parameter)] for parameter in made.optimizer.state},
    }


def _parameters(model: nn.Module) -> dict[str, bytes]:
    return {plain_name(name): cases.full(p).numpy().tobytes() for name, p in model.named_parameters()}
