"""Every layout trains the same model: loss and gradient norm equal those of one process, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"strategy": "fsdp", "sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"strategy": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD of 4": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD", "shard_size": 4},
    "NO_SHARD": {"strategy": "fsdp", "sharding_strategy": "NO_SHARD"},
    "tp 4": {"tp": 4},
    "tp 4, sequence parallel": {"tp": 4, "sequence_parallel": True},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2},
    "FULL_SHARD x tp 2, sequence parallel": {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
    "NO_SHARD x tp 2, sequence parallel": {"sharding_strategy": "NO_SHARD", "tp": 2, "sequence_parallel": True},
    "ddp x tp 2": {"strategy": "ddp", "tp": 2},
}
PIPELINED: dict[str, dict[str, Any]] = {"pp 2": {"pp": 2, "sharding_strategy": "FULL_SHARD"}}
CUT = [name for name, layout in LAYOUTS.items() if "tp" in layout]
BOTH_CUT = "FULL_SHARD x tp 2, sequence parallel"
STEPS = 6


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_are_those_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    curves = pool.run("curve", corpus=corpus, options=options(LAYOUTS[layout]), folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about a number that is global"


@pytest.mark.parametrize("layout", ["FULL_SHARD", BOTH_CUT])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_tiled_attention_and_fast_products_change_nothing(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str, recompute: str | None
) -> None:
    opts = options(LAYOUTS[layout] | {"activation_checkpointing": recompute})
    curves = pool.run("curve_by_products", corpus=corpus, options=opts, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", CUT)
def test_a_cut_vocabulary_predicts_genes_as_one_process_does(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: str
) -> None:
    # 122 tokens on 4 processes: the last has fewer rows
    one, cut = (options(LAYOUTS[layout] if cut else {}, model={"objective": "masked_gene"}) for cut in (False, True))
    expected = cases.curve(corpus, one, str(tmp_path / "one"), STEPS)
    curves = pool.run("curve", corpus=corpus, options=cut, folder=str(tmp_path / "cut"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), np.array(expected), atol=5e-6, rtol=5e-6)
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.parametrize("rows", [122, 9, 3])
def test_the_loss_over_a_cut_vocabulary_is_torchs_with_any_number_of_rows(pool: Pool, rows: int) -> None:
    shapes, generator = ((rows, 8), (rows,), (7, 8)), torch.Generator().manual_seed(rows)
    table, bias, states = (torch.randn(shape, generator=generator) for shape in shapes)
    tokens, answers = torch.arange(11) % rows, torch.arange(7) * 5 % rows
    for tensor in (table, bias, states):
        tensor.requires_grad_()
    embedded = F.embedding(tokens, table)
    loss = F.cross_entropy(F.linear(states + embedded[:7], table, bias), answers, reduction="sum")
    expected = [loss, *torch.autograd.grad(2 * loss, (table, bias, states))]
    numbers = [tensor.detach().numpy() for tensor in (table, bias, states, tokens, answers)]
    for found in pool.run("cut_vocabulary", arrays=numbers):
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "reduction"),
    [
        *((layout, "step") for layout in ("ddp", "HYBRID_SHARD", "tp 4", BOTH_CUT)),
        *((layout, "micro_batch") for layout in ("HYBRID_SHARD", BOTH_CUT)),
    ],
)
def test_accumulation_changes_nothing(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str, reduction: str
) -> None:
    parallel = LAYOUTS[layout] | {"gradient_reduction": reduction}
    small = options(parallel, train={"token_budget": 100 if "tp" not in LAYOUTS[layout] else 300})
    curves = pool.run("curve", corpus=corpus, options=small, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD", BOTH_CUT, "pp 2"])
def test_activation_checkpointing_changes_nothing(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str, how: str
) -> None:
    recomputed = options((LAYOUTS | PIPELINED)[layout] | {"activation_checkpointing": how})
    curves = pool.run("curve", corpus=corpus, options=recomputed, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD"])
def test_bf16_stays_near_fp32(pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str) -> None:
    half = options(LAYOUTS[layout] | {"precision": "bf16-mixed"})
    curves = np.array(
        pool.run("curve", corpus=corpus, options=half, folder=str(tmp_path), steps=STEPS)[0],
    )
    assert not np.array_equal(curves, reference), "bf16-mixed computed in fp32"
    np.testing.assert_allclose(curves[:, 0], reference[:, 0], rtol=2e-2)


@pytest.mark.parametrize("layout", ["NO_SHARD", *CUT])
def test_bf16_is_that_of_one_process(pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: str) -> None:
    one, spread = (options(parallel | {"precision": "bf16-mixed"}) for parallel in ({}, LAYOUTS[layout]))
    expected = cases.curve(corpus, one, str(tmp_path / "one"), STEPS)
    curves = pool.run("curve", corpus=corpus, options=spread, folder=str(tmp_path / "spread"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0])[:, 0], np.array(expected)[:, 0], rtol=5e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_bitwise_equal_in_every_layout(pool: Pool, alone: None, corpus: str, layout: str) -> None:
    expected = cases.initial_parameters(corpus, options())
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS[layout])):
        assert {n: p["bytes"] for n, p in found.items()} == {n: p["bytes"] for n, p in expected.items()}


def test_hybrid_shard_shards_inside_a_node_and_replicates_across(pool: Pool, corpus: str) -> None:
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS["HYBRID_SHARD"])):
        for name, parameter in found.items():
            assert parameter["mesh"] == [2, 2], name
            assert parameter["placements"] == ["R", "S(0)"], name
            if parameter["full"][0] % 2 == 0:
                assert parameter["local"][0] == parameter["full"][0] // 2, name


@pytest.mark.parametrize("layout", ["tp 4", "FULL_SHARD x tp 2"])
def test_tensor_parallel_cuts_matrices_by_heads_width_and_tokens(pool: Pool, corpus: str, layout: str) -> None:
    cut = {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
    tp = LAYOUTS[layout]["tp"]
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS[layout])):
        for name, parameter in found.items():
            dim = 0 if name == "gene_embedding.weight" else cut.get(".".join(name.split(".")[2:]))
            if dim is not None:
                assert (parameter["placements"][-1], parameter["mesh"][-1]) == (f"S({dim})", tp), name
            elif name.endswith((".out.bias", ".down.bias")):
                assert parameter["placements"][-1] == "R", name
            else:
                assert len(parameter["mesh"]) == (0 if tp == 4 else 1), name


@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD", BOTH_CUT])
def test_ranks_hold_the_same_parameters_after_20_steps(pool: Pool, corpus: str, tmp_path: Path, layout: str) -> None:
    found = pool.run(
        "parameters_after", corpus=corpus, options=options(LAYOUTS[layout]), folder=str(tmp_path), steps=20
    )
    assert all(parameters == found[0] for parameters in found)


def test_an_epoch_that_leaves_a_rank_without_cells_does_not_hang(pool: Pool, corpus: str, tmp_path: Path) -> None:
    # 3 cells a lane and step over some 42: the last batch of an epoch is short
    uneven = options(LAYOUTS["HYBRID_SHARD"], train={"global_batch": 12})
    curves = pool.run("curve", corpus=corpus, options=uneven, folder=str(tmp_path), steps=32)
    assert len(curves[0]) == 32
    assert np.isfinite(curves[0]).all()


def test_every_process_group_of_a_mesh_gets_the_timeout(pool: Pool) -> None:
    for found in pool.run("timeouts", parallel=LAYOUTS["HYBRID_SHARD"], seconds=77.0):
        assert len(found) > 2
        assert set(found) == {77.0}
