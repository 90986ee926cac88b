"""batch_column auto: which column it takes and why, and that a corpus without batches is untouched."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cellmill.config.checks import check_together
from cellmill.config.corpus import Shard
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions, TrainOptions
from cellmill.config.parts.batch import BatchChoice, choose_batch
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.writer import write_shards
from cellmill.models.export import spec_of
from cellmill.runs.identity import changed_keys, identity
from cellmill.stages import plan
from cellmill.stages.training_inputs import CorpusFacts, open_corpus
from tests.models import train_options
from tests.unit.small_corpus import genes_named, random_counts, vocabulary_of, write_dataset

N_CELLS = 220
AUTO: dict[str, Any] = {"name": "cell_decoding", "batch_column": "auto"}
NO_DATASET = "dataset has 1 value of at least 100 training cells"


def write_corpus(folder: Path, *frames: dict[str, object]) -> Manifest:
    """Shards of a dataset for each frame of obs, all for training."""
    ids = genes_named(30)
    paths = []
    for number, obs in enumerate(frames):
        counts = random_counts(N_CELLS, 30, seed=number)
        paths.append(write_dataset(folder / f"cells/{number}.h5ad", counts, ids, obs))
    shard = Shard.model_validate({"val_frac": 0, "test_frac": 0, "cells_per_shard": 100})
    return write_shards(paths, vocabulary_of(ids), shard, folder / "shards/manifest.json")


def blocks(**sizes: int) -> list[str | float]:
    """Each name as often as its size; missing values for the rest of the cells."""
    values: list[str | float] = []
    for name, size in sizes.items():
        values += [name] * size
    return values + [np.nan] * (N_CELLS - len(values))


def options_of(**sections: Any) -> TrainOptions:
    return train_options(**{"model": {"family": "profile"}, "objective": AUTO} | sections)


def choose(folder: Path, *frames: dict[str, object], labels: tuple[str, ...] = ()) -> BatchChoice:
    return choose_batch(CorpusFacts(options_of(), write_corpus(folder, *frames)), labels)


@pytest.mark.parametrize(
    ("frames", "column", "adversary", "reason"),
    [
        (
            [{"batch": blocks(a=110, b=110), "donor": blocks(x=110, y=110)}],
            "batch",
            0.1,
            "batch has 2 values of at least 100 training cells; adversary 0.1",
        ),
        (
            [{"batch": blocks(a=220), "donor": blocks(x=120, y=100)}],
            "donor",
            None,
            "donor has 2 values of at least 100 training cells; donor may be biology: no adversary; "
            "batch has 1 value of at least 100 training cells",
        ),
        (
            [{}, {}],
            "dataset",
            None,
            "dataset has 2 values of at least 100 training cells; dataset may be biology: no adversary; "
            "there is no batch; there is no donor",
        ),
        (
            [{"batch": blocks(a=121, b=99)}],
            None,
            None,
            "none: batch has 1 value of at least 100 training cells; there is no donor; "
            + NO_DATASET,
        ),
        (
            [{"batch": blocks(a=90, b=90)}],
            None,
            None,
            "none: batch has 0 values of at least 100 training cells; there is no donor; "
            + NO_DATASET,
        ),
        ([{}], None, None, "none: there is no batch; there is no donor; " + NO_DATASET),
        (
            # only the first of three datasets has batches
            [{"batch": blocks(a=110, b=110)}, {}, {}],
            "dataset",
            None,
            "dataset has 3 values of at least 100 training cells; dataset may be biology: no adversary; "
            "batch has 2 values of at least 100 training cells, but these are 220 of 660; there is no donor",
        ),
    ],
    ids=["batch", "donor", "dataset", "too few cells", "no batch counts", "no column", "missing"],
)
def test_the_first_column_with_two_batches_is_taken(
    tmp_path: Path,
    frames: list[dict[str, object]],
    column: str | None,
    adversary: float | None,
    reason: str,
) -> None:
    assert choose(tmp_path, *frames) == BatchChoice(column, adversary, reason)


@pytest.mark.parametrize(("swapped", "is_taken"), [(0, False), (8, False), (15, True)])
def test_a_batch_that_determines_the_condition_is_not_taken(
    tmp_path: Path, swapped: int, is_taken: bool
) -> None:
    condition = blocks(healthy=110, ill=110)
    condition[:swapped] = ["ill"] * swapped
    choice = choose(tmp_path, {"batch": blocks(a=110, b=110), "condition": condition})
    if is_taken:
        assert (choice.column, choice.adversary) == ("batch", 0.1)
    else:
        reason = f"none: batch determines condition; there is no donor; {NO_DATASET}"
        assert choice == BatchChoice(None, None, reason)


def test_a_label_of_the_objective_is_no_batch(tmp_path: Path) -> None:
    batch = {"batch": blocks(a=110, b=110)}
    choice = choose(tmp_path, batch, labels=("batch",))
    assert choice.reason == f"none: batch is a label; there is no donor; {NO_DATASET}"
    kind = batch | {"kind": blocks(x=110, y=110)}
    assert choose(tmp_path / "kind", kind, labels=("kind",)).column is None


def test_pairs_of_levels_are_those_of_a_crosstab(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {name: rng.choice(["a", "b", "c", None], N_CELLS) for name in ("batch", "donor")}
    )
    manifest = write_corpus(tmp_path, {name: frame[name].to_numpy() for name in frame})
    facts = CorpusFacts(options_of(), manifest)
    expected = frame.dropna().value_counts().to_dict()
    assert facts.cells_by_levels("batch", "donor") == expected
    assert facts.cells_by_levels("batch", "missing") == {}


@pytest.mark.parametrize("name", ["cell_decoding", "denoise"])
def test_a_corpus_without_batches_is_the_same_run(tmp_path: Path, name: str) -> None:
    manifest = write_corpus(tmp_path, {"batch": blocks(a=220)})
    opened = []
    for column in ("auto", None):
        objective = {"name": name, "batch_column": column}
        opened.append(open_corpus(options_of(objective=objective), manifest.path))
    auto, without = opened
    assert auto.fingerprint == without.fingerprint
    assert identity(auto.options, None) == identity(without.options, None)
    specs = [spec_of(corpus.options.model_dump(), 30) for corpus in opened]
    assert specs[0].levels == specs[1].levels == {}


def test_a_chosen_batch_is_the_named_one(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, {"batch": blocks(a=110, b=110)})
    named = {"name": "cell_decoding", "batch_column": "batch", "batch_adversary": 0.1}
    auto = open_corpus(options_of(), manifest.path)
    written = open_corpus(options_of(objective=named), manifest.path)
    assert auto.fingerprint == written.fingerprint
    assert identity(auto.options, None) == identity(written.options, None)
    # a later version may word the reason differently
    stored = {
        "options": auto.options.model_dump(mode="json"),
        "identity": identity(auto.options, None),
    }
    stored["options"]["objective"]["batch_reason"] = "another text"
    assert changed_keys(stored, identity(written.options, None), "run.json") == {}


def test_a_strength_of_the_user_stands(tmp_path: Path) -> None:
    donors = {"donor": blocks(a=110, b=110)}
    strong = AUTO | {"batch_adversary": 0.3, "batch_adversary_scale": 0.01}
    opened = open_corpus(options_of(objective=strong), write_corpus(tmp_path, donors).path)
    objective: Any = opened.options.objective
    assert (objective.batch_adversary, objective.batch_adversary_scale) == (0.3, 0.01)
    # without a batch there is nothing to scale, and stored options must be valid
    alone = open_corpus(options_of(objective=strong), write_corpus(tmp_path / "one", {}).path)
    objective = alone.options.objective
    assert (objective.batch_adversary, objective.batch_adversary_scale) == (None, 0.02)
    TrainOptions.model_validate(alone.options.model_dump(mode="json"))


def test_a_scale_without_an_adversary_is_left_out(tmp_path: Path) -> None:
    donors = write_corpus(tmp_path, {"donor": blocks(a=110, b=110)})
    scaled = AUTO | {"batch_adversary_scale": 0.05}
    opened = open_corpus(options_of(objective=scaled), donors.path)
    objective: Any = opened.options.objective
    assert objective.batch_column == "donor"
    assert (objective.batch_adversary, objective.batch_adversary_scale) == (None, 0.02)
    TrainOptions.model_validate(opened.options.model_dump(mode="json"))


def test_a_part_of_a_sum_chooses_too(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, {"batch": blocks(a=110, b=110), "kind": ["x", "y"] * 110})
    parts = {"cell_decoding": {"batch_column": "auto"}, "classification": {"label_column": "kind"}}
    opened = open_corpus(options_of(objective={"name": "sum", "parts": parts}), manifest.path)
    assert opened.options.obs_columns() == {
        "batch": "objective.parts.cell_decoding.batch_column",
        "kind": "objective.parts.classification.label_column",
    }
    assert "batch" in opened.options.objective.choices()["batch"]
    assert "batch_reason" not in str(identity(opened.options, None))


def test_the_plan_names_the_batch_and_the_reason(tmp_path: Path, capsys: Any) -> None:
    manifest = write_corpus(tmp_path, {"batch": blocks(a=110, b=110)})
    sections = options_of().model_dump(mode="json") | {"plan": {}}
    plan.plan(
        options=PlanOptions.model_validate(sections),
        manifest=manifest.path,
        out=tmp_path / "plan.json",
        machine=Machine(nodes="1", nproc_per_node=1),
        device="cpu",
    )
    reason = "batch has 2 values of at least 100 training cells; adversary 0.1"
    assert json.loads((tmp_path / "plan.json").read_text())["choices"] == {"batch": reason}
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["batch", reason] in lines


@pytest.mark.parametrize("part", ["batch", "cell_decoding"])
def test_only_the_loss_of_an_adversary_may_be_largest(part: str) -> None:
    adversary = {"name": "classification", "label_column": "site", "adversarial_scale": 0.1}
    tree: dict[str, Any] = {name: {} for name in TrainOptions.model_fields}
    tree["objective"] = {"name": "sum", "parts": {"cell_decoding": {}, "batch": adversary}}
    tree["train"] = {"steps": 1, "best_metric": f"val_loss_{part}", "best_mode": "max"}
    if part == "batch":
        check_together(TrainOptions.model_validate(tree))
    else:
        with pytest.raises(ValueError, match="smaller is better; set"):
            check_together(TrainOptions.model_validate(tree))
