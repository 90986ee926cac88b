"""The promises that cellmill keeps for its own parts, for the toys: the test that an author writes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cellmill.testing import LAYOUTS, check_plugin


def test_the_toys_keep_the_promises(tmp_path: Path) -> None:
    check_plugin(
        tmp_path,
        {
            "model.hidden": 32,
            "model.layers": 4,
            "model.heads": 4,
            "objective.skip": 1,
            "train.optimizer.decay": 0.7,
        },
        LAYOUTS | {"tp of whole tokens": {"tp": 2}},
        tokens={"tokenizer": "toy_genes", "max_tokens": 48},
        model={"family": "toy", "hidden": 16, "layers": 2, "heads": 2},
        objective={"name": "toy_next_gene"},
        train={"optimizer": {"name": "toy_momentum", "decay": 0.8}, "lr": 0.1},
    )
    angles = load_file(tmp_path / "alone, model" / "model.safetensors")["angles"]  # a buffer
    expected = np.arange(48)[:, None] * 10_000.0 ** (-np.arange(4)[None] / 4)
    np.testing.assert_allclose(angles, expected, rtol=1e-6)


def test_an_objective_that_reads_a_number_of_obs_passes(tmp_path: Path) -> None:
    check_plugin(
        tmp_path,
        {"objective.number_column": "fraction_2"},
        {"ddp": LAYOUTS["ddp"]},
        model={"family": "profile", "hidden": 16},
        objective={"name": "toy_number", "number_column": "fraction_1"},
    )


def test_an_option_without_another_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"got none of \['finetune.rank'\]"):
        check_plugin(tmp_path, {}, finetune={"method": "toy_adapter"})


def test_a_section_that_training_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"that training reads, got \['evaluate'\], which it"):
        check_plugin(tmp_path, {}, evaluate={"tasks": {}})
