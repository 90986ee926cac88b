"""Every fine-tuning method with every family: what is frozen stays, what trains moves, and merged
is as adapted.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.methods import MethodConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Train
from cellmill.data.stream.batch import Batch
from cellmill.files import write_json
from cellmill.finetune.method import Method, load_method, make_is_trained
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, write_tensors
from cellmill.models.family import Model
from cellmill.parallel.apply import freeze
from cellmill.parallel.materialize import materialize, plain_name
from cellmill.train.optimizer import build_optimizer, decayed_parameters
from tests.models import FAMILIES as BUILT_IN
from tests.models import random_cells

N_GENES = 60
LENGTHS = (20, 31, 1, 14, 2, 9)
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}
FAMILIES = BUILT_IN | {
    "hf bert": (
        "rank",
        {"family": "hf", "weights": "random", "architecture": {"model_type": "bert"} | BERT},
    ),
    "hf gpt2": (
        "rank",
        {"family": "hf", "weights": "random", "architecture": {"model_type": "gpt2"} | GPT2},
    ),
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 2, "alpha": 6, "trunk_lr_frac": 1},
    "partial": {"method": "partial", "last_blocks": 1, "trunk_lr_frac": 1},
    "head_only": {"method": "head_only"},
    "full": {"method": "full", "layer_decay": 0.5},
}
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
NAMES = [
    pytest.param(name, marks=needs_transformers if name.startswith("hf") else ())
    for name in FAMILIES
]


def spec_of(family: str) -> ModelSpec:
    """A model of the family that learns a label."""
    tokenizer, options = FAMILIES[family]
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 64})
    objective = ObjectiveConfig.model_validate({"name": "classification", "label_column": "kind"})
    return ModelSpec(
        FamilyConfig.model_validate(options), objective, tokens, N_GENES, {"kind": ("a", "b")}
    )


def cells(tokens: Tokens) -> Batch:
    """Six labelled cells."""
    levels = np.random.default_rng(0).integers(1, 3, (len(LENGTHS), 1)).astype(np.int32)
    return to_tensors(random_cells(LENGTHS, tokens, N_GENES, first=0, levels=levels))


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    """A copy of every parameter, by plain name."""
    return {
        plain_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("family", NAMES)
def test_only_matrices_of_blocks_decay(family: str) -> None:
    model = build(spec_of(family))
    decayed = decayed_parameters(model)
    parameters = dict(model.named_parameters())
    assert decayed
    assert all(parameters[name].dim() == 2 for name in decayed)
    matrices = {
        name for name, parameter in parameters.items() if name.startswith(model.plan.blocks)
    }
    assert {name for name in matrices if parameters[name].dim() == 2} <= decayed


def tuned(family: str, method: str) -> tuple[Model, Method, dict[str, torch.Tensor]]:
    """The model after two steps of the method, and its parameters before them."""
    made = load_method(MethodConfig.model_validate(METHODS[method]))
    given = spec_of(family)
    model = build(given, made.transform)
    freeze(model, make_is_trained(made, model))
    materialize(model, torch.device("cpu"), initial_tensors(model, 0, None, None))
    before = tensors_of(model)
    batch = cells(given.tokens)
    optimizer = build_optimizer(
        model, Train.model_validate({"steps": 2, "lr": 1e-2}), None, made.group
    )
    for step in range(2):
        model(
            model.prepare(model.view(batch, seed=0, step=step), seed=0, step=step)
        ).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), made, before


def pairs() -> list[Any]:
    """Each method on each family; in `make test` each on the encoder, and each family with lora."""
    rows = []
    for method in METHODS:
        for name in NAMES:
            tier = [] if method == "lora" or name.values == ("encoder",) else [pytest.mark.full]
            rows.append(pytest.param(method, *name.values, marks=[*name.marks, *tier]))
    return rows


@pytest.mark.parametrize(("method", "family"), pairs())
def test_a_merged_model_equals_the_adapted_one(family: str, method: str) -> None:
    model, made, before = tuned(family, method)
    given = spec_of(family)
    after = tensors_of(model)
    trains = make_is_trained(made, model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        *filter(trains, after)
    }
    plain = build(given)
    batch = cells(given.tokens)
    with torch.inference_mode():
        adapted = model.embed(batch)
        made.merge(model)
        assert model.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(model.embed(batch), adapted, atol=1e-5, rtol=1e-5)
    merged = tensors_of(model)
    moved = {name for name in merged if not torch.equal(merged[name], before[name])}
    in_blocks = any(name.startswith(f"{plain.plan.blocks}.") for name in moved)
    assert in_blocks == (method != "head_only")


@pytest.mark.parametrize(
    "family", [name for name in NAMES if name.values[0] in ("encoder", "hf bert", "hf gpt2")]
)
def test_peft_reads_the_adapter(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip(
        "peft", reason="peft is not installed: envs/requirements-hf.lock has it"
    )
    transformers = pytest.importorskip("transformers")
    model, made, before = tuned(family, "lora")
    given = made.adapter(model)
    assert given is not None
    config, tensors = given
    write_tensors(
        tmp_path / "adapter_model.safetensors",
        {name: tensor.clone() for name, tensor in tensors.items()},
    )
    write_json(tmp_path / "adapter_config.json", config)
    made.merge(model)
    base: Any = build(spec_of(family))
    materialize(base, torch.device("cpu"), initial_tensors(base, 0, None, None))
    for name, parameter in base.named_parameters():  # peft brings the trained heads
        torch.testing.assert_close(parameter.data, before[name], atol=0, rtol=0)
    base.config = transformers.PreTrainedConfig()  # peft asks it whether embeddings are tied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    ours = model.state_dict()
    moved = 0
    assert theirs.state_dict().keys() == ours.keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(tensor, ours[name], atol=1e-6, rtol=0, msg=name)
        moved += name in before and not torch.equal(tensor, before[name])
    # adapted layers, and the head's weight and bias
    assert moved >= len(config["target_modules"]) + 2
