"""Pipelines train the model of one process, with every schedule and combination of layouts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 4, GPipe": {"pp": 4, "schedule": "GPipe"},
    "pp 4, 1F1B": {"pp": 4},
    "pp 2, 1F1B x FULL_SHARD": {"pp": 2, "sharding_strategy": "FULL_SHARD"},
    "pp 2, 1F1B x ddp": {"pp": 2, "strategy": "ddp"},
    "pp 2, 1F1B x tp 2": {"pp": 2, "tp": 2},
    "pp 2, Interleaved1F1B x tp 2, sequence parallel": {
        "pp": 2,
        "schedule": "Interleaved1F1B",
        "tp": 2,
        "sequence_parallel": True,
    },
    "pp 2, Interleaved1F1B x FULL_SHARD": {
        "pp": 2,
        "schedule": "Interleaved1F1B",
        "sharding_strategy": "FULL_SHARD",
    },
    "pp 2, InterleavedZeroBubble x HYBRID_SHARD": {"pp": 2, "schedule": "InterleavedZeroBubble"},
    "pp 2, ZBV x SHARD_GRAD_OP": {"pp": 2, "schedule": "ZBV", "sharding_strategy": "SHARD_GRAD_OP"},
    "pp 2, DualPipeV x FULL_SHARD": {"pp": 2, "schedule": "DualPipeV", "sharding_strategy": "FULL_SHARD"},
    "pp 4, ZBV": {"pp": 4, "schedule": "ZBV"},
}
EIGHT: dict[str, dict[str, Any]] = {
    "pp 2 x FULL_SHARD of 2 x tp 2": {"pp": 2, "tp": 2, "sharding_strategy": "FULL_SHARD"},
    "pp 2 x replicate 2 x shard 2": {"pp": 2, "sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "pp 2, ZBV x FULL_SHARD of 2 x tp 2, sequence parallel": {
        "pp": 2,
        "schedule": "ZBV",
        "tp": 2,
        "sequence_parallel": True,
        "sharding_strategy": "FULL_SHARD",
    },
}
STEPS = 5
MODEL = {"layers": 8}
GENES = MODEL | {"objective": "masked_gene"}  # ties the vocabulary between the first and the last stage


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Curves of one process."""
    return {
        model.get("objective", "masked_value"): np.array(
            cases.curve(corpus, options(model=model), str(tmp_path_factory.mktemp("one")), STEPS)
        )
        for model in (MODEL, GENES)
    }


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    """Eight processes, as two nodes of four."""
    made = Pool(world=8, local_world=4)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("layout", "model"),
    [*((layout, GENES) for layout in LAYOUTS), ("pp 4, 1F1B", MODEL), ("pp 2, ZBV x SHARD_GRAD_OP", MODEL)],
    ids=lambda given: given if isinstance(given, str) else given.get("objective", "masked_value"),
)
def test_loss_norm_and_validation_are_those_of_one_process(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, layout: str, model: dict[str, Any]
) -> None:
    staged = options(LAYOUTS[layout], model=model)
    curves = pool.run("curve", corpus=corpus, options=staged, folder=str(tmp_path), steps=STEPS)
    expected = references[model.get("objective", "masked_value")]
    np.testing.assert_allclose(np.array(curves[0]), expected, atol=5e-6, rtol=5e-6)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about a number that is global"


@pytest.mark.parametrize("layout", EIGHT)
def test_three_axes_train_the_model_of_one_process(
    eight: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, layout: str
) -> None:
    staged = options(EIGHT[layout], model=GENES)
    curves = eight.run("curve", corpus=corpus, options=staged, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), references["masked_gene"], atol=5e-6, rtol=5e-6)
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.parametrize("layout", ["pp 2, InterleavedZeroBubble x HYBRID_SHARD", "pp 4, ZBV"])
@pytest.mark.parametrize(
    "changed",
    [
        {"train": {"token_budget": 100}},
        {"parallel": {"microbatches": 12}},
        {"parallel": {"activation_checkpointing": "full"}},
        {"train": {"val_every_steps": 2}},
    ],
    ids=["more micro-batches by budget", "more micro-batches by option", "recomputed", "validated between steps"],
)
def test_how_a_step_is_cut_changes_nothing(
    pool: Pool, corpus: str, references: dict[str, np.ndarray], tmp_path: Path, layout: str, changed: dict[str, Any]
) -> None:
    staged = options(
        LAYOUTS[layout] | changed.get("parallel", {}), model=MODEL, **{k: changed[k] for k in changed if k == "train"}
    )
    curves = pool.run("curve", corpus=corpus, options=staged, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), references["masked_value"], atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", ["pp 4, 1F1B", "pp 2, 1F1B x FULL_SHARD", "pp 2, ZBV x SHARD_GRAD_OP"])
def test_the_validation_loss_is_that_of_one_process(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: str
) -> None:
    one, staged = (options(parallel, model=GENES) for parallel in ({}, LAYOUTS[layout]))
    expected = cases.validation(corpus, one, str(tmp_path / "one"))
    for found in pool.run("validation", corpus=corpus, options=staged, folder=str(tmp_path / "staged")):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["pp 4, 1F1B", "pp 2, 1F1B x FULL_SHARD", "pp 2, 1F1B x tp 2"])
def test_bf16_is_that_of_one_process(pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: str) -> None:
    one, staged = (options(parallel | {"precision": "bf16-mixed"}, model=MODEL) for parallel in ({}, LAYOUTS[layout]))
    expected = cases.curve(corpus, one, str(tmp_path / "one"), STEPS)
    curves = pool.run("curve", corpus=corpus, options=staged, folder=str(tmp_path / "staged"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0])[:, 0], np.array(expected)[:, 0], rtol=5e-3)


@pytest.mark.parametrize("layout", ["pp 4, 1F1B", "pp 2, ZBV x SHARD_GRAD_OP", "pp 2, 1F1B x tp 2"])
def test_stages_start_bitwise_as_one_process_and_cover_every_parameter(
    pool: Pool, alone: None, corpus: str, layout: str
) -> None:
    expected = {n: p["bytes"] for n, p in cases.initial_parameters(corpus, options(model=GENES)).items()}
    seen: set[str] = set()
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS[layout], model=GENES)):
        assert {n: p["bytes"] for n, p in found.items()}.items() <= expected.items()
        seen |= found.keys()
        assert len(found) < len(expected)
    assert seen == expected.keys()


@pytest.mark.parametrize("layout", ["pp 4, 1F1B", "pp 2, 1F1B x FULL_SHARD", "pp 2, ZBV x SHARD_GRAD_OP"])
def test_copies_of_a_tied_parameter_stay_equal(pool: Pool, corpus: str, tmp_path: Path, layout: str) -> None:
    staged = options(LAYOUTS[layout], model=GENES)
    found = pool.run("all_parameters_after", corpus=corpus, options=staged, folder=str(tmp_path), steps=20)
    values: dict[str, set[bytes]] = {}
    for rank in found:
        for name, content in rank:
            values.setdefault(name, set()).add(content)
    assert {name for name, contents in values.items() if len(contents) > 1} == set()
    tables = [name for rank in found for name, _ in rank if name == "gene_embedding.weight"]
    assert len(tables) == {"pp 4, 1F1B": 2, "pp 2, 1F1B x FULL_SHARD": 4, "pp 2, ZBV x SHARD_GRAD_OP": 4}[layout]


def test_a_run_goes_through_stages_and_layouts_with_its_optimizer(
    pool: Pool, alone: None, corpus: str, tmp_path: Path
) -> None:
    train = {"steps": 10, "schedule": "constant", "checkpoint_every_steps": 2}
    unbroken = np.array(cases.curve(corpus, options(model=GENES, train=train), str(tmp_path / "unbroken"), 10))
    course: list[dict[str, Any]] = [
        LAYOUTS["pp 2, 1F1B x FULL_SHARD"],
        {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
        LAYOUTS["pp 4, ZBV"],
        {"sharding_strategy": "FULL_SHARD"},
    ]
    for steps, layout in zip((2, 4, 6, 8), course):
        each = options(layout, model=GENES, train=train)
        found = pool.run("curve", corpus=corpus, options=each, folder=str(tmp_path), steps=steps, load=steps > 2)[0]
        np.testing.assert_allclose(np.array(found), unbroken[steps - 2 : steps], rtol=2e-6)
    last = cases.curve(corpus, options(model=GENES, train=train), str(tmp_path), 10, load=True)
    np.testing.assert_allclose(np.array(last), unbroken[8:], rtol=2e-6)


def test_a_resumed_pipeline_is_bitwise_the_uninterrupted_run(pool: Pool, corpus: str, tmp_path: Path) -> None:
    train = {"steps": 8, "checkpoint_every_steps": 4}
    staged = options(LAYOUTS["pp 2, ZBV x SHARD_GRAD_OP"], model=GENES, train=train)
    whole = pool.run("curve", corpus=corpus, options=staged, folder=str(tmp_path), steps=8)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    resumed = pool.run("curve", corpus=corpus, options=staged, folder=str(tmp_path), steps=8, load=True)
    assert resumed[0] == whole[0][4:]


def test_an_epoch_that_leaves_a_process_without_cells_does_not_hang(pool: Pool, corpus: str, tmp_path: Path) -> None:
    uneven = options(LAYOUTS["pp 2, 1F1B x FULL_SHARD"], model=MODEL, train={"global_batch": 12})
    curves = pool.run("curve", corpus=corpus, options=uneven, folder=str(tmp_path), steps=32)
    assert np.isfinite(curves[0]).all()
