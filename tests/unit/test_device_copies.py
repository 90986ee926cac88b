"""A step on a device mixes no devices, copies nothing to it, and waits for no value.

Torch without CUDA cannot run a backward pass on fake CUDA tensors: autograd asks the driver for a stream. So the meta
device stands for the GPU, on which every value that the host would wait for is an error, as on fake tensors; what a
batch needs has been copied to it before. Attention's CUDA path is seen by a forward pass on fake CUDA tensors.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.models import blocks
from cellmill.models.batch import on_device, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.planner.size import _sample
from tests.models import FAMILIES as BUILT_IN
from tests.models import SHAPE

N_GENES, CELL_TOKENS, TOKENS = 60, 24, 240
LEVELS = {"kind": ("a", "b", "c"), "perturbation": ("control", "G1"), "batch": ("x", "y")}
# family hf is left out: its padding of cells reads their lengths, so it does wait for the device
FAMILIES = BUILT_IN | {"encoder rank": ("rank", {"family": "encoder"} | SHAPE)}
RESPONSE = {"control": "control", "perturbed_genes": {"G1": [5]}}
TAUGHT = {"width": 6, "sha256": "", "shards": "", "model": "", "supervised_by": []}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "cell_decoding": {"batch_column": "batch", "batch_adversary": 1.0},
    "cell_decoding nb": {"likelihood": "nb"},
    "denoise": {},
    "query_decoding": {},
    "masked_value": {},
    "masked_gene": {},
    "next_gene": {},
    "classification": {"label_column": "kind"},
    "regression": {"target_column": "score"},
    "supervised_contrastive": {"label_column": "kind"},
    "distill": {"teacher": "./big", "vectors": TAUGHT},
    "perturbation_response": RESPONSE,
    "sum": {"parts": {"cell_decoding": {}, "classification": {"label_column": "kind", "weight": 0.5}}},
}
EACH = [  # every family and every objective once
    *(("encoder", name) for name in OBJECTIVES if name not in ("next_gene", "masked_gene")),
    *(("encoder rank", "masked_gene"), ("autoregressive", "next_gene"), ("profile", "cell_decoding")),
    *(("autoencoder", "query_decoding"), ("bert", "masked_gene"), ("scgpt", "perturbation_response")),
]


def _serves(family: str, objective: str) -> bool:
    kind = FamilyConfig.model_validate(FAMILIES[family][1])
    parts = ObjectiveConfig.model_validate({"name": objective.split()[0]} | OBJECTIVES[objective]).each()
    return all(part.name in kind.objectives or kind.family in part.families for part in parts)


PRODUCT = [(family, name) for family in FAMILIES for name in OBJECTIVES if _serves(family, name)]


class OnDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of two devices, or copies one of them to the other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a number without dimensions is passed by value, and waits for nothing
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.ndim]
        assert len({x.device.type for x in tensors}) < 2, f"{func} copies between devices or mixes them"
        return out


class Lists(TorchFunctionMode):
    """Raises where numbers of Python are read to a device, which would wait for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            assert out.device.type == "cpu", "numbers of Python are copied to the device"
        return out


def _spec(family: str, objective: str) -> ModelSpec:
    tokenizer, options = FAMILIES[family]
    given = {"name": objective.split()[0]} | OBJECTIVES[objective]
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64}).fitted((0.0, 10.0))
    spec = ModelSpec(FamilyConfig.model_validate(options), ObjectiveConfig.model_validate(given), tokens, N_GENES, {})
    columns = spec.objective.columns().levels
    return ModelSpec(spec.model, spec.objective, tokens, N_GENES, {name: LEVELS[name] for name in columns})


def _prepared(model: Model, spec: ModelSpec, device: torch.device) -> Any:
    view = model.view(to_tensors(_sample(spec, CELL_TOKENS, TOKENS)), seed=0, step=0)
    prepared = model.prepare(view, seed=0, step=0)
    return prepared if device.type == "cpu" else on_device(prepared, device)


def check(family: str, objective: str) -> None:
    spec = _spec(family, objective)
    model = build(spec).bfloat16()
    assert all(parameter.is_meta for parameter in model.parameters())
    prepared = _prepared(model, spec, torch.device("meta"))
    with OnDevice(), Lists():
        loss = model.finish(model.through(model.begin(prepared), prepared), prepared)
        (loss.sum() if loss.ndim else loss).backward()
    gradients = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert gradients


@pytest.mark.parametrize(("family", "objective"), EACH)
def test_a_training_step_neither_mixes_devices_nor_waits(family: str, objective: str) -> None:
    check(family, objective)


@pytest.mark.full
@pytest.mark.parametrize(("family", "objective"), [pair for pair in PRODUCT if pair not in EACH])
def test_a_training_step_of_any_family_and_objective_neither_mixes_devices_nor_waits(
    family: str, objective: str
) -> None:
    check(family, objective)


def test_a_list_that_is_copied_to_the_device_is_found() -> None:
    x = torch.empty(3, device="meta")
    with pytest.raises(AssertionError, match="copies between devices"), OnDevice():
        x + torch.tensor([1.0, 2.0, 3.0]).to("meta")
    with pytest.raises(AssertionError, match="numbers of Python"), Lists():
        torch.tensor([1, 2, 3], device=x.device)
    with pytest.raises(RuntimeError, match="meta"), OnDevice():
        x.sum().item()


def test_attention_on_cuda_reads_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_has_flash", lambda device: True)
    with FakeTensorMode(), torch.no_grad(), OnDevice(), Lists():
        q = torch.empty(10, 2, 16, dtype=torch.bfloat16, device="cuda")
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        assert blocks.attention(q, q, q, cu_seqlens, [4, 6]).device.type == "cuda"
