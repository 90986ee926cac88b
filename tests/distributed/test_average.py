"""The average of the weights: its formula, validation and export by it, and resume into another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.runs.folder import Checkpoint, TrainFolder
from cellmill.train.checkpoint import CheckpointReader, load_tensors
from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import BOTH_CUT, LAYOUTS

DECAY, STEPS = 0.3, 6  # after the warm-up, (1 + t) / (10 + t), of the first three steps
CHAINS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LAYOUTS["ddp"], LAYOUTS[BOTH_CUT]),
    ({"pp": 2, "schedule": "ZBV", "tp": 2}, LAYOUTS["HYBRID_SHARD"] | {"cpu_offload": "full"}),
]
"""Layouts of the first and of the second half."""


def run(parallel: dict[str, Any] | None = None, decay: float | None = DECAY, every: int = 3) -> dict[str, Any]:
    train = {"lr": 1e-2, "schedule": "constant", "ema_decay": decay, "val_every_steps": 1, "keep_checkpoints": 9}
    return options(parallel, train=train | {"checkpoint_every_steps": every}, model={"layers": 4})


def read(checkpoint: Checkpoint, part: str) -> dict[str, torch.Tensor]:
    known = CheckpointReader(checkpoint.path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(known[name].size) for name in known if name.startswith(part)}
    load_tensors(checkpoint.path, tensors)
    return {name.removeprefix(part): tensor for name, tensor in tensors.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_average_follows_its_formula_and_is_validated_and_exported(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    lines = cases.logged(corpus, run(every=1), str(tmp_path / "train"), STEPS)
    plain = cases.logged(corpus, run(decay=None), str(tmp_path / "plain"), STEPS)
    same = cases.logged(corpus, run(decay=1e-9), str(tmp_path / "same"), STEPS)
    assert [line["loss"] for line in lines if "loss" in line] == [line["loss"] for line in plain if "loss" in line]
    validated, at_end = ([line["val_loss"] for line in of if "val_loss" in line] for of in (lines, plain))
    assert [line["val_loss"] for line in same if "val_loss" in line] == pytest.approx(at_end, abs=1e-6)
    assert np.abs(np.array(validated) - at_end).min() > 1e-5, "validation is of the weights"
    checkpoints = TrainFolder(tmp_path / "train").checkpoints()
    expected: dict[str, torch.Tensor] = {}
    for at, checkpoint in enumerate(checkpoints[1:], start=1):  # that of step 1 has the average after step 0
        before, decay = read(checkpoints[at - 1], "average."), min(DECAY, (1 + at) / (10 + at))
        expected = {k: decay * before[k] + (1 - decay) * v for k, v in read(checkpoint, "model.").items()}
        torch.testing.assert_close(read(checkpoint, "average."), expected, atol=1e-7, rtol=1e-6)
    assert not read(TrainFolder(tmp_path / "plain").checkpoints()[-1], "average.")
    exported = cases.exported(corpus, tmp_path / "train", tmp_path / "model")
    assert "| step | 6, weights averaged with decay 0.3 |" in (tmp_path / "model" / "README.md").read_text()
    assert exported.keys() == expected.keys()
    torch.testing.assert_close(exported, read(checkpoints[-1], "average."), atol=0, rtol=0)


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return cases.logged(corpus, run(), str(tmp_path_factory.mktemp("one")), STEPS)


@pytest.mark.parametrize("chain", CHAINS, ids=["ddp, FULL_SHARD x tp 2", "pp 2 x tp 2, HYBRID_SHARD on the CPU"])
def test_the_average_is_that_of_one_process_through_layouts(
    pool: Pool, corpus: str, reference: list[dict[str, float]], tmp_path: Path, chain: tuple[Any, Any]
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    lines = pool.run("logged", options=run(chain[0]), steps=3, **given)[0]
    lines += pool.run("logged", options=run(chain[1]), steps=STEPS, load=True, **given)[0]
    for key in ("loss", "val_loss"):
        found, expected = ([line[key] for line in of if key in line] for of in (lines, reference))
        np.testing.assert_allclose(found, expected, atol=5e-6, rtol=5e-6)
