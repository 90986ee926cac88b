"""Fine-tuning methods: what trains, from which step on and how fast, the same in every layout;
exports are merged.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cellmill.errors import ConfigError
from tests.checks import quick
from tests.distributed import cases
from tests.distributed.conformance import LAYOUTS, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

STEPS = 4
LAYERS = 4
LINEAR = ("qkv", "out", "up", "down")
METHODS: dict[str, dict[str, Any]] = {
    "gradual": {
        "method": "full",
        "trunk_lr_frac": 0.5,
        "layer_decay": 0.5,
        "head_steps": 1,
        "block_steps": 1,
    },
    "partial": {"method": "partial", "last_blocks": 2, "trunk_lr_frac": 0.1},
    "head_only": {"method": "head_only"},
    "lora": {"method": "lora", "rank": 4, "alpha": 12},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gradual", LAYOUTS["ddp"]),
    ("gradual", LAYOUTS[TP]),
    ("gradual", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("partial", LAYOUTS["HYBRID_SHARD"] | {"activation_checkpointing": "selective"}),
    ("partial", {"pp": 2, "schedule": "ZBV", "tp": 2}),
    ("head_only", {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ("head_only", {"pp": 4, "cpu_offload": "optimizer"}),
    ("head_only", {"pp": 2, "schedule": "ZBV", "sharding_strategy": "NO_SHARD"}),
]
ADAPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LAYOUTS["ddp"], LAYOUTS["FULL_SHARD"] | {"activation_checkpointing": "selective"}),
    (LAYOUTS["HYBRID_SHARD"] | {"cpu_offload": "optimizer"}, LAYOUTS["tp 4"]),
    (LAYOUTS[TP], {"pp": 2, "sharding_strategy": "FULL_SHARD"}),
    ({"pp": 2, "schedule": "ZBV", "tp": 2}, LAYOUTS["FULL_SHARD x tp 2"]),
]
"""Layouts of the first and of the last two steps of adapters."""
Found = dict[str, Any]


def run(method: str, parallel: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "schedule": "constant", "checkpoint_every_steps": 2}
    return options(
        parallel, finetune=dict(METHODS[method]), model={"layers": LAYERS} | model, train=train
    )


@pytest.fixture(scope="module")
def references(
    alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Found]:
    folders = {method: str(tmp_path_factory.mktemp(method)) for method in METHODS}
    return {
        method: cases.trained(corpus, run(method), folder, STEPS)
        for method, folder in folders.items()
    }


def names(found: Found) -> set[str]:
    return {name for name, _ in found["first"]}


def moved(found: Found) -> set[str]:
    last = dict(found["last"])
    return {name for name, before in found["first"] if not np.array_equal(last[name], before)}


def of_blocks(names: set[str], *blocks: int) -> set[str]:
    prefixes = tuple(f"blocks.{block}." for block in blocks)
    return {name for name in names if name.startswith(prefixes)}


def heads(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(("head.", "cell_head.", "value_out."))}


def rates(found: Found) -> dict[str, float]:
    rate_by_name = {}
    for names, _, rate in found["groups"]:
        rate_by_name |= dict.fromkeys(names, rate)
    return rate_by_name


def rates_of_steps(found: Found) -> list[dict[str, float]]:
    rates_by_step = []
    for line in found["lines"]:
        if "loss" in line:
            rates_by_step.append({key: line[key] for key in line if key.startswith("lr_")})
    return rates_by_step


ADAPTERS = {
    f"blocks.{block}.{layer}.{part}.weight"
    for block, layer, part in product(range(LAYERS), LINEAR, "ab")
}


@pytest.mark.parametrize(
    ("method", "trunk", "logged"),
    [
        ("head_only", set(), {}),
        ("partial", {"blocks.2.", "blocks.3.", "norm."}, {"lr_heads": 1e-3, "lr_trunk": 1e-4}),
        ("lora", ADAPTERS, {"lr_heads": 1e-3, "lr_trunk": 1e-4}),
    ],
)
def test_parameter_groups_train_at_their_own_rates(
    references: dict[str, Found], method: str, trunk: set[str], logged: dict[str, float]
) -> None:
    found = references[method]
    every = names(found)
    adapted = {name for name in every if name.startswith(tuple(trunk))}
    assert heads(every)
    assert moved(found) == found["states"] == found["with gradient"] == adapted | heads(every)
    assert rates(found) == pytest.approx(
        dict.fromkeys(adapted, 1e-4) | dict.fromkeys(heads(every), 1e-3)
    )
    assert rates_of_steps(found)[-1] == pytest.approx(logged)


def test_blocks_unfreeze_in_turn_at_rates_that_fall_with_depth(
    references: dict[str, Found],
) -> None:
    found = references["gradual"]
    every = names(found)
    # heads in step 0, block 3 and the norm in 1, block 2 in 2, block 1 in 3; block 0 and embeddings
    # would in 4 and 5
    assert moved(found) == heads(every) | of_blocks(every, 1, 2, 3) | {"norm.weight", "norm.bias"}
    assert found["with gradient"] == every
    known = rates(found)
    for block in range(LAYERS):
        assert {known[name] for name in of_blocks(every, block)} == {
            1e-3 * 0.5 * 0.5 ** (LAYERS - 1 - block)
        }
    assert known["gene_embedding.weight"] == 1e-3 * 0.5 * 0.5**LAYERS
    assert known["norm.weight"] == 1e-3 * 0.5
    blocks = {
        f"lr_block_{block}": 1e-3 * 0.5 * 0.5 ** (LAYERS - 1 - block) for block in range(LAYERS)
    }
    for step, line in enumerate(rates_of_steps(found), start=1):  # 0 until they begin
        warm = min(1, step / 2)
        begun = {"lr_heads"} | {f"lr_block_{LAYERS - 1 - below}" for below in range(step - 1)}
        expected = {"lr_heads": 1e-3, "lr_embeddings": 1e-3 * 0.5 * 0.5**LAYERS, **blocks}
        assert line == pytest.approx(
            {key: warm * lr if key in begun else 0 for key, lr in expected.items()}
        )
    assert {known[name] for name in heads(every)} == {1e-3}


def test_adapters_of_all_linear_layers_do_not_decay(references: dict[str, Found]) -> None:
    found = references["lora"]
    assert names(found) >= ADAPTERS
    assert {decay for names, decay, _ in found["groups"] if names & ADAPTERS} == {0.0}


def test_a_merged_export_equals_the_adapted_model(alone: None, corpus: str, tmp_path: Path) -> None:
    given = run("lora")
    given["finetune"] |= {"targets": ["qkv", "down"]}
    found = cases.trained(corpus, given, str(tmp_path / "train"), STEPS)
    merged = cases.exported(corpus, tmp_path / "train", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
    saved = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert config["target_modules"] == [
        f"blocks.{block}.{layer}" for block, layer in product(range(LAYERS), ("qkv", "down"))
    ]
    base = dict(found["first"])
    for name, tensor in merged.items():
        expected = torch.from_numpy(base[name])
        path = name.removesuffix(".weight")
        if path in config["target_modules"]:
            a = tensors.pop(f"{path}.lora_A.weight")
            b = tensors.pop(f"{path}.lora_B.weight")
            assert (len(a), b.shape[1]) == (4, 4)
            assert b.any()
            expected = expected + 3.0 * b @ a
        elif name.split(".")[0] in config["modules_to_save"]:
            expected = tensors.pop(name)
        torch.testing.assert_close(tensor, expected, atol=1e-7, rtol=1e-6)
    assert not tensors


def test_an_unknown_target_is_refused(alone: None, corpus: str, tmp_path: Path) -> None:
    given = run("lora")
    given["finetune"] |= {"targets": ["qvk"]}
    with pytest.raises(
        ConfigError, match=r"finetune\.targets: no linear layer 'qvk'; did you mean .*qkv"
    ):
        cases.trainer(corpus, given, str(tmp_path), STEPS)


def assert_trained_alike(rank: Found, expected: Found, curve: list[list[float]]) -> None:
    """The curve is this one; what the method trains has moved, and all else is as it was, to the
    bit.
    """
    np.testing.assert_allclose(np.array(rank["curve"]), np.array(curve), atol=5e-6, rtol=5e-6)
    assert moved(rank) == moved(expected) & names(rank)
    assert rank["with gradient"] == expected["with gradient"] & names(rank)


@pytest.mark.parametrize(("method", "layout"), quick(CASES, CASES[2:4]), ids=str)
def test_a_method_trains_as_in_one_process(
    pool: Pool,
    corpus: str,
    references: dict[str, Found],
    tmp_path: Path,
    method: str,
    layout: dict[str, Any],
) -> None:
    expected = references[method]
    ranks = pool.run(
        "trained", corpus=corpus, options=run(method, layout), folder=str(tmp_path), steps=STEPS
    )
    if method == "head_only":
        assert not all(rank["states"] for rank in ranks), "every rank trains something"
    for rank in ranks:
        assert_trained_alike(rank, expected, expected["curve"])
        assert rates(rank) == {
            name: lr for name, lr in rates(expected).items() if name in names(rank)
        }
    assert set().union(*map(names, ranks)) == names(expected)


@pytest.mark.parametrize(("first", "then"), quick(ADAPTED, ADAPTED[2:3]), ids=str)
def test_adapters_resume_in_another_layout(
    pool: Pool,
    corpus: str,
    references: dict[str, Found],
    tmp_path: Path,
    first: dict[str, Any],
    then: dict[str, Any],
) -> None:
    expected = references["lora"]
    given = {"corpus": corpus, "folder": str(tmp_path)}
    initial = dict(expected["first"])
    begun = pool.run("trained", options=run("lora", first), steps=2, **given)
    ended = pool.run("trained", options=run("lora", then), steps=STEPS, load=True, **given)
    for ranks, curve in ((begun, expected["curve"][:2]), (ended, expected["curve"][2:])):
        assert all(rank["curve"] == ranks[0]["curve"] for rank in ranks)
        for rank in ranks:
            assert_trained_alike(rank, expected, curve)
            assert all(np.array_equal(value, initial[name]) for name, value in rank["first"])
        assert set().union(*map(names, ranks)) == names(expected)


@pytest.mark.full
def test_tied_parameters_can_be_frozen(
    pool: Pool, alone: None, corpus: str, tmp_path: Path
) -> None:
    one, four = (run("lora", layout, objective="masked_gene") for layout in ({}, {"pp": 4}))
    expected = cases.trained(corpus, one, str(tmp_path / "one"), STEPS)
    for rank in pool.run(
        "trained", corpus=corpus, options=four, folder=str(tmp_path / "four"), steps=STEPS
    ):
        assert_trained_alike(rank, expected, expected["curve"])


def test_a_run_that_unfreezes_resumes_where_it_stopped(
    references: dict[str, Found], alone: None, corpus: str, tmp_path: Path
) -> None:
    expected = references["gradual"]
    given = {"corpus": corpus, "options": run("gradual"), "folder": str(tmp_path)}
    first = cases.trained(steps=2, **given)
    second = cases.trained(steps=STEPS, load=True, **given)
    assert first["curve"] + second["curve"] == expected["curve"]
    assert all(
        np.array_equal(own, other)
        for (_, own), (_, other) in zip(second["last"], expected["last"], strict=True)
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "gradual",
            "full trains no parameter of this model in its first 1 steps: the objective has no heads",
        ),
        ("head_only", "head_only trains no parameter of this model; set another"),
    ],
)
def test_a_method_without_anything_to_train_is_refused(
    alone: None, corpus: str, tmp_path: Path, method: str, message: str
) -> None:
    given = run(method) | {
        "objective": {"name": "supervised_contrastive", "label_column": "cell_type"}
    }
    with pytest.raises(ConfigError, match=f"finetune.method {message}"):
        cases.trainer(corpus, given, str(tmp_path), STEPS)
