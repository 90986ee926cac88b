"""Learning rates of the parts of a model, for metrics.jsonl: heads, blocks and embeddings, or the trunk as a whole."""

from collections.abc import Mapping
from typing import NamedTuple

from cellmill.finetune.depth import Depth
from cellmill.finetune.method import Method, trained_names
from cellmill.models.family import Model
from cellmill.parallel.materialize import plain_name


class GroupRate(NamedTuple):
    """Rate of some parameters: a factor of the scheduled one, from a step on."""

    scale: float
    first_step: int


def group_rates(method: Method, model: Model) -> dict[str, GroupRate]:
    """Return the rates of `heads` and `trunk`, or of `heads`, `embeddings` and each `block_N`, where they differ.

    Empty where all parameters train at the scheduled rate. `model` is whole, and `method` has transformed it.
    """
    depth, trains = Depth.of(model), trained_names(method, model)
    rates: dict[str, GroupRate] = {}
    for name, _ in model.named_parameters():
        plain = plain_name(name)
        if trains(plain):
            rate = GroupRate(method.group(plain).get("lr_scale", 1.0), method.first_step(plain))
            rates.setdefault(_label(depth, plain), rate)
    if set(rates.values()) <= {GroupRate(1.0, 0)}:
        return {}
    trunk = {rate for label, rate in rates.items() if label != "heads"}
    if len(trunk) != 1:
        return rates
    return {label: rate for label, rate in rates.items() if label == "heads"} | {"trunk": trunk.pop()}


def rates_line(rates: Mapping[str, GroupRate], lr: float, step: int) -> dict[str, float]:
    """Return the rates in step `step`, from 0, for metrics.jsonl; 0 of what does not train yet."""
    return {f"lr_{label}": lr * rate.scale * (step >= rate.first_step) for label, rate in rates.items()}


def _label(depth: Depth, name: str) -> str:
    if depth.is_head(name):
        return "heads"
    level = depth.level(name)
    return f"block_{level - 1}" if level else "embeddings"
