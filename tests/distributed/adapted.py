"""A fine-tuning method with low-rank adapters, as a plug-in would have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from cellmill import registry
from cellmill.config.finetune import MethodConfig
from cellmill.finetune.method import Method
from cellmill.models.family import Model
from cellmill.models.initial import with_std
from cellmill.parallel.materialize import plain_name
from tests.distributed import cases

STYLES = {"columns": ("columns", "norm", "columns"), "rows": ("rows", "rows", "norm")}
LAYERS = ("qkv", "out", "up", "down")


def register() -> None:
    """Make the method known in this process."""
    registry.BUILT_IN["method"]["low_rank"] = "tests.distributed.adapted:LowRankConfig"


class LowRankConfig(MethodConfig):
    """Low-rank adapters of the linear layers of all blocks, and the heads."""

    implementation: ClassVar[str] = "tests.distributed.adapted:LowRank"
    method: Literal["low_rank"] = "low_rank"
    rank: int = 4
    trained: tuple[str, ...] = (".a.weight", ".b.weight", "head.")
    """Parts of the names of trained parameters."""


class Adapted(nn.Module):
    """base(x) + b(a(x)), where b starts as zeros."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = with_std(nn.Linear(base.in_features, rank, bias=False), base.in_features**-0.5)
        self.b = with_std(nn.Linear(rank, base.out_features, bias=False), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class LowRank(Method):
    config: LowRankConfig

    def transform(self, model: Model) -> None:
        styles = dict(model.plan.tensor)
        for block in model.get_submodule(model.plan.blocks):
            for name in LAYERS:
                setattr(block, name, Adapted(getattr(block, name), self.config.rank))
        for name in LAYERS:
            path = f"{model.plan.blocks}.*.{name}"
            styles |= dict(zip((f"{path}.base", f"{path}.a", f"{path}.b"), STYLES[styles.pop(path)]))
        model.plan = replace(model.plan, tensor=styles)

    def trains(self, name: str) -> bool:
        return any(part in name for part in self.config.trained)

    def group(self, name: str) -> dict[str, float]:
        return {"lr_scale": 0.5} if "head." in name else {"weight_decay": 0.0}

    def merge(self, model: Model) -> None:
        for block in model.get_submodule(model.plan.blocks):
            for name in LAYERS:
                adapted = getattr(block, name)
                adapted.base.weight.data += adapted.b.weight.data @ adapted.a.weight.data
                setattr(block, name, adapted.base)


def tuned(corpus: str, options: dict[str, Any], folder: str, steps: int, load: bool = False) -> dict[str, Any]:
    """[loss, gradient norm] of each step, this rank's parameters before and after, and what each group trains."""
    register()
    made, lines = cases.trainer(corpus, options, folder, steps)
    before = _parameters(made.model)
    if load:
        cases.go_on(made, folder)
    made.run()
    made.train_stream.close()
    names = {id(parameter): plain_name(name) for name, parameter in made.model.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g["weight_decay"], g["lr"]) for g in made.optimizer.param_groups]
    return {
        "rates": [{key: line[key] for key in line if key.startswith("lr_")} for line in lines.lines if "loss" in line],
        "curve": [[line["loss"], line["grad_norm"]] for line in lines.lines if "loss" in line],
        "before": before,
        "after": _parameters(made.model),
        "groups": groups,
        "with gradient": {plain_name(name) for name, p in made.model.named_parameters() if p.requires_grad},
        "states": {names[id(parameter)] for parameter in made.optimizer.state},
    }


def _parameters(model: nn.Module) -> dict[str, bytes]:
    return {plain_name(name): cases.full(p).numpy().tobytes() for name, p in model.named_parameters()}
