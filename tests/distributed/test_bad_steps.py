"""Steps with a non-finite loss or gradient norm: skipped on all ranks, counted, and named in the final error."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.tiers import quick

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "HYBRID_SHARD": {},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
    "FULL_SHARD x pp 2": {"sharding_strategy": "FULL_SHARD", "pp": 2},
    "pp 2 x tp 2": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, ["HYBRID_SHARD", "FULL_SHARD x pp 2"]))
def test_a_skipped_step_changes_no_bit_of_parameters_and_moments(
    pool: Pool, corpus: str, tmp_path: Path, layout: str
) -> None:
    run = options(LAYOUTS[layout], train={"schedule": "constant"})
    good = pool.run("trained", corpus=corpus, options=run, folder=str(tmp_path / "2"), steps=2, bad=[])
    skipped = pool.run("trained", corpus=corpus, options=run, folder=str(tmp_path / "4"), steps=4, bad=[3, 4])
    for before, after in zip(good, skipped):
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(after["last"], before["last"], strict=True))
        assert after["moments"] == before["moments"]
        assert (after["progress"]["skipped_steps"], after["progress"]["skipped_in_a_row"]) == (2, 2)
        assert after["progress"]["cells"] == 64
    assert [line for line in skipped[0]["lines"] if "skipped" in line] == [
        {"step": step, "skipped": "loss nan and gradient norm nan", "skipped_steps": step - 2} for step in (3, 4)
    ]


NAMED = [("ddp", 1, 4), ("FULL_SHARD x tp 2", 2, 8), ("FULL_SHARD x pp 2", 1, 8)]


@pytest.mark.parametrize(("layout", "rank", "cells"), quick(NAMED, NAMED[:1]))
def test_a_resumed_run_skips_and_ends_as_an_uninterrupted_one_which_names_the_rank_and_the_cells(
    pool: Pool, corpus: str, tmp_path: Path, layout: str, rank: int, cells: int
) -> None:
    run = options(LAYOUTS[layout], train={"steps": 9, "checkpoint_every_steps": 4, "max_bad_steps": 3})
    each = {"corpus": corpus, "options": run, "bad": [2, 4, 5, 6], "steps": 9}
    alone = pool.run("trained", folder=str(tmp_path / "alone"), **each)
    assert len({of_rank["error"] for of_rank in alone}) == 1, "ranks disagree"
    more = rf" and {cells - 4} more cells \(see the log\)" if cells > 4 else ""
    cell = r"sim:\S+ \(train-\S+\.h5ad row \d+\)"
    assert re.fullmatch(
        r"loss nan and gradient norm nan at step 6, the last of 3 bad steps in a row \(train\.max_bad_steps 3\): "
        r"lower train\.lr \(0\.001\) or raise train\.warmup_steps; earlier checkpoints are intact; "
        rf"rank {rank} had {cell}, {cell}, {cell}, {cell}{more}",
        alone[0]["error"],
    )
    shutil.copytree(tmp_path / "alone", tmp_path / "resumed")
    resumed = pool.run("trained", folder=str(tmp_path / "resumed"), load=True, **each)
    assert resumed[0]["lines"][0]["step"] == 5
    for key in ("error", "progress", "moments"):
        assert [of_rank[key] for of_rank in resumed] == [of_rank[key] for of_rank in alone], key


def test_a_finite_loss_with_an_infinite_gradient_is_skipped_too(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lines = cases.trainer(corpus, options(), str(tmp_path), 3)
    before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    next(made.model.parameters()).register_hook(lambda gradient: gradient / 0)
    made.run()
    made.train_stream.close()
    assert all(parameter.equal(before[name]) for name, parameter in made.model.named_parameters())
    skipped = [line["skipped"] for line in lines.lines if "skipped" in line]
    assert len(skipped) == 3
    assert all(re.fullmatch(r"loss [\d.]+ and gradient norm (nan|inf)", text) for text in skipped)


def test_a_validation_loss_that_is_not_finite_is_logged_and_training_continues(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    found = cases.trained(corpus, options(train={"val_every_steps": 2}), str(tmp_path), 4, bad_validation=True)
    assert found["done"]
    told = [line for line in found["lines"] if "skipped" in line]
    assert told == [{"step": step, "skipped": "validation loss nan"} for step in (2, 4)]
    assert [found["progress"][key] for key in ("val_loss", "best_val_loss", "best_step")] == [None, None, None]
