"""Frozen parameters stay, adapters train as in one process in every layout, and an export is a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill import registry
from cellmill.errors import ConfigError
from tests.distributed import adapted, cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import BOTH_CUT, LAYOUTS

STEPS = 4
SPREAD: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("ddp", "tp 4", BOTH_CUT)},
    "FULL_SHARD, recomputed": LAYOUTS["FULL_SHARD"] | {"activation_checkpointing": "selective"},
    "HYBRID_SHARD, optimizer on the CPU": LAYOUTS["HYBRID_SHARD"] | {"cpu_offload": "optimizer"},
    "pp 2 x FULL_SHARD": {"pp": 2, "sharding_strategy": "FULL_SHARD"},
    "pp 2, ZBV x tp 2": {"pp": 2, "schedule": "ZBV", "tp": 2},
}
LOW_RANK: dict[str, Any] = {"method": "low_rank"}
HEAD_ONLY = LOW_RANK | {"trained": ["head."]}
STAGED: dict[str, dict[str, Any]] = {
    "pp 2 x FULL_SHARD": {"pp": 2, "sharding_strategy": "FULL_SHARD"},
    "pp 4, optimizer on the CPU": {"pp": 4, "cpu_offload": "optimizer"},
    "pp 2, ZBV": {"pp": 2, "schedule": "ZBV", "sharding_strategy": "NO_SHARD"},
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    adapted.register()
    yield
    del registry.BUILT_IN["method"]["low_rank"]


def run(parallel: dict[str, Any], finetune: dict[str, Any], **model: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "schedule": "constant", "checkpoint_every_steps": 2}
    return options(parallel, finetune=finetune, model={"layers": 4} | model, train=train)


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {
        str(method): adapted.tuned(corpus, run({}, method), str(tmp_path_factory.mktemp("one")), STEPS)
        for method in (LOW_RANK, HEAD_ONLY)
    }


def assert_frozen(found: dict[str, Any], trained: set[str]) -> None:
    for name, before in found["before"].items():
        assert (found["after"][name] == before) == (name not in trained), name


def test_frozen_parameters_stay_bitwise_and_have_no_optimizer_state(references: dict[str, dict[str, Any]]) -> None:
    found = references[str(LOW_RANK)]
    trained = {name for name in found["before"] if ".a." in name or ".b." in name or "head." in name}
    assert_frozen(found, trained)
    assert found["with gradient"] == found["states"] == trained
    heads, matrices = {name for name in trained if "head." in name}, {"head.0.weight", "cell_head.0.weight"}
    assert sorted(found["groups"], key=lambda group: len(group[0])) == [
        (matrices, 0.1, 5e-4),
        (heads - matrices, 0.0, 5e-4),
        (trained - heads, 0.0, 1e-3),
    ]


@pytest.mark.parametrize("layout", SPREAD)
def test_adapters_train_as_in_one_process_and_resume_from_a_checkpoint(
    pool: Pool, corpus: str, references: dict[str, dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    expected = references[str(LOW_RANK)]
    given = {"corpus": corpus, "options": run(SPREAD[layout], LOW_RANK), "folder": str(tmp_path)}
    halves = [pool.run("adapted.tuned", steps=2, **given), pool.run("adapted.tuned", steps=STEPS, load=True, **given)]
    for half, curve in zip(halves, (expected["curve"][:2], expected["curve"][2:])):
        np.testing.assert_allclose(np.array(half[0]["curve"]), np.array(curve), atol=5e-6, rtol=5e-6)
        assert all(rank["curve"] == half[0]["curve"] for rank in half)
        for rank in half:
            assert rank["before"].items() <= expected["before"].items()
            assert_frozen(rank, expected["with gradient"])
            assert rank["with gradient"] == rank["before"].keys() & expected["with gradient"]
    assert set().union(*(rank["before"] for rank in halves[0])) == expected["before"].keys()


@pytest.mark.parametrize("layout", STAGED)
def test_a_fully_frozen_pipeline_stage_still_passes_activations_and_gradients(
    pool: Pool, corpus: str, references: dict[str, dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    expected = references[str(HEAD_ONLY)]
    given = run(STAGED[layout], HEAD_ONLY)
    found = pool.run("adapted.tuned", corpus=corpus, options=given, folder=str(tmp_path), steps=STEPS)
    assert not all(rank["states"] for rank in found), "every rank trains something"
    for rank in found:
        np.testing.assert_allclose(np.array(rank["curve"]), np.array(expected["curve"]), atol=5e-6, rtol=5e-6)
        assert_frozen(rank, expected["with gradient"])


def test_tied_parameters_can_be_frozen(pool: Pool, alone: None, corpus: str, tmp_path: Path) -> None:
    gene = {"objective": "masked_gene"}
    expected = adapted.tuned(corpus, run({}, LOW_RANK, **gene), str(tmp_path / "one"), STEPS)
    given = run({"pp": 4}, LOW_RANK, **gene)
    for rank in pool.run("adapted.tuned", corpus=corpus, options=given, folder=str(tmp_path / "four"), steps=STEPS):
        np.testing.assert_allclose(np.array(rank["curve"]), np.array(expected["curve"]), atol=5e-6, rtol=5e-6)
        assert_frozen(rank, expected["with gradient"])


def test_an_export_has_the_merged_weights_and_is_a_plain_model(alone: None, corpus: str, tmp_path: Path) -> None:
    found = adapted.tuned(corpus, run({}, LOW_RANK), str(tmp_path / "train"), STEPS)
    after = {name: np.frombuffer(content, np.float32) for name, content in found["after"].items()}
    tensors = cases.exported(corpus, tmp_path / "train", tmp_path / "model")
    assert tensors.keys() == {name for name in after if ".a." not in name and ".b." not in name}
    for name, tensor in tensors.items():
        expected = torch.from_numpy(after[name].copy()).reshape(tensor.shape)
        path = name.removesuffix(".weight")
        if f"{path}.a.weight" in after:
            a, b = (torch.from_numpy(after[f"{path}.{part}.weight"].copy()) for part in "ab")
            expected = expected + b.reshape(len(tensor), -1) @ a.reshape(-1, tensor.shape[1])
        assert torch.equal(tensor, expected), name


def test_a_method_that_trains_nothing_is_refused(alone: None, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"finetune\.method low_rank trains no parameter of this model; set another"):
        cases.trainer(corpus, run({}, LOW_RANK | {"trained": ["nothing"]}), str(tmp_path), STEPS)
