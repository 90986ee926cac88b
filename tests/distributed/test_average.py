"""The average of the weights: its formula, validation and export by it; `test_conformance` has it in layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.runs.folder import Checkpoint, TrainFolder
from cellmill.train.checkpoint import CheckpointReader, load_tensors
from tests.distributed import cases
from tests.distributed.conftest import options

DECAY, STEPS = 0.3, 6  # after the warm-up, (1 + t) / (10 + t), of the first three steps


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
    lines = cases.trained(corpus, run(every=1), str(tmp_path / "train"), STEPS)["lines"]
    plain = cases.trained(corpus, run(decay=None), str(tmp_path / "plain"), STEPS)["lines"]
    same = cases.trained(corpus, run(decay=1e-9), str(tmp_path / "same"), STEPS)["lines"]
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
