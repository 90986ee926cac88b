"""CPU offload trains the same model, and its checkpoints resume in any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import BOTH_CUT, LAYOUTS, PIPELINED

STEPS = 6
OPTIMIZER, FULL = {"cpu_offload": "optimizer"}, {"cpu_offload": "full"}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(), str(tmp_path_factory.mktemp("one")), STEPS))


def test_offload_in_one_process_is_bitwise_the_same(reference: np.ndarray, corpus: str, tmp_path: Path) -> None:
    found = cases.curve(corpus, options(OPTIMIZER), str(tmp_path), STEPS)
    assert np.array_equal(np.array(found), reference)


@pytest.mark.parametrize("layout", ["ddp", "FULL_SHARD", "HYBRID_SHARD", "tp 4", BOTH_CUT, "pp 2"])
def test_an_optimizer_on_the_cpu_trains_the_model_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    spread = options((LAYOUTS | PIPELINED)[layout] | OPTIMIZER)
    curves = pool.run("curve", corpus=corpus, options=spread, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("layout", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", BOTH_CUT, "pp 2"])
def test_parameters_on_the_cpu_train_the_model_of_one_process(
    pool: Pool, corpus: str, reference: np.ndarray, tmp_path: Path, layout: str
) -> None:
    spread = options((LAYOUTS | PIPELINED)[layout] | FULL, train={"token_budget": 300})  # gradients are accumulated
    curves = pool.run("curve", corpus=corpus, options=spread, folder=str(tmp_path), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0]), reference, atol=5e-6, rtol=5e-6)


def test_checkpoints_resume_with_and_without_offload(pool: Pool, alone: None, corpus: str, tmp_path: Path) -> None:
    train = {"steps": 10, "schedule": "constant", "checkpoint_every_steps": 2}
    unbroken = np.array(cases.curve(corpus, options(train=train), str(tmp_path / "unbroken"), 10))
    steps = {2: LAYOUTS[BOTH_CUT] | OPTIMIZER, 4: LAYOUTS["ddp"], 6: LAYOUTS["FULL_SHARD"] | FULL}
    for step, layout in (steps | {8: PIPELINED["pp 2"] | OPTIMIZER}).items():
        each = options(layout, train=train)
        found = pool.run("curve", corpus=corpus, options=each, folder=str(tmp_path), steps=step, load=step > 2)[0]
        np.testing.assert_allclose(np.array(found), unbroken[step - 2 : step], rtol=3e-6, err_msg=str(layout))
    last = cases.curve(corpus, options(OPTIMIZER, train=train), str(tmp_path), 10, load=True)
    np.testing.assert_allclose(np.array(last), unbroken[8:], rtol=3e-6)


@pytest.mark.parametrize("offload", [OPTIMIZER, FULL], ids=str)
def test_offload_in_bf16_trains_the_model_of_one_process(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, offload: dict[str, str]
) -> None:
    low = {"precision": "bf16-mixed"}
    expected = cases.curve(corpus, options(low), str(tmp_path / "one"), STEPS)
    spread = options(LAYOUTS["FULL_SHARD"] | low | offload | {"activation_checkpointing": "selective"})
    curves = pool.run("curve", corpus=corpus, options=spread, folder=str(tmp_path / "spread"), steps=STEPS)
    np.testing.assert_allclose(np.array(curves[0])[:, 0], np.array(expected)[:, 0], rtol=5e-3)
