"""Every layout trains the model of one process: a test for each promise, over the table in
`conformance.py`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cellmill.config import plugin
from cellmill.train.checkpoint import CheckpointReader
from tests.distributed import buffered, cases, conformance
from tests.distributed.conformance import (
    AXES,
    CHAINS,
    COMBINED,
    CUTS,
    PAIRS,
    PRODUCT,
    SUM_OF_LABELS,
    Case,
    grouped,
)
from tests.distributed.pool import Pool

TOLERANCE = 5e-6
# profile models have no blocks of tokens, and refuse sequence parallel
OF_CELLS = [model for model, options in PAIRS.items() if options["family"] == "profile"]
CELL_AXES = ("ddp", "fsdp", "tp of whole tokens")
OF_TOKENS = [model for model in PAIRS if model not in OF_CELLS]
ON_TWO = [Case(model, axis, 2) for model, axis in itertools.product(OF_TOKENS, AXES)]
ON_TWO += [Case(model, axis, 2) for model, axis in itertools.product(OF_CELLS, CELL_AXES)]
OF_SEQUENCES = [Case("hf", "ddp", 2), Case("hf", "fsdp", 2), Case("proteins", "tp", 2)]
BUFFERED = Case("buffered", "pp", 2)
BEGUN = [Case("masked_gene", axis, 2) for axis in AXES]
BEGUN += [*COMBINED[:6], *COMBINED[8:11], BUFFERED]
EXPORTED = [
    Case(model, axis, 2)
    for model, axis in zip(PAIRS, itertools.cycle(AXES))
    if model not in OF_CELLS
]
EXPORTED += [COMBINED[4], BUFFERED]
ALL = [*ON_TWO, *OF_SEQUENCES, *COMBINED, BUFFERED]
Trained = dict[str, Any]


def rows(quick: list[Case], product: list[Case] = PRODUCT) -> Any:
    """Cases of `make test`, and of the product those that only `make test-all` has."""
    parameters = [grouped(case, full=False) for case in quick]
    parameters += [grouped(case, full=True) for case in product if case not in quick]
    return pytest.mark.parametrize("case", parameters)


class Table:
    """Trainings of the table, each made once in a session."""

    def __init__(
        self, pools: Callable[[int], Pool], corpora: dict[str, str], vectors: str, folder: Path
    ) -> None:
        self.pools = pools
        self.corpora = corpora
        self.vectors = vectors
        self.folder = folder
        self.made: dict[str, list[Trained]] = {}

    def corpus(self, model: str) -> str:
        return self.corpora[conformance.CORPORA.get(model, "cells")]

    def train(
        self, model: str, ranks: int, given: dict[str, Any], folder: Path, **more: Any
    ) -> list[Trained]:
        """What each rank returns of a training."""
        given = json.loads(json.dumps(given).replace('"VECTORS"', json.dumps(self.vectors)))
        more |= {"corpus": self.corpus(model), "options": given, "folder": str(folder)}
        if ranks == 1:
            results = [cases.trained(**more)]
        else:
            results = self.pools(ranks).run("trained", **more)
        for result in results:
            for key in ("first", "last"):
                result[key] = [(name, conformance.digest_of(x)) for name, x in result[key]]
        return results

    def once(self, case: Case) -> tuple[list[Trained], Path]:
        """The same of a case, and its folder."""
        given = conformance.spread(case)
        key = {"steps": conformance.STEPS}
        name = conformance.digest([case.ranks, given, key])
        if name not in self.made:
            self.made[name] = self.train(case.model, case.ranks, given, self.folder / name, **key)
        return self.made[name], self.folder / name

    def alone(
        self, model: str, precision: str = "32-true", steps: int = conformance.STEPS
    ) -> Trained:
        """The same of one process with one micro-batch a step."""
        given = conformance.run(model, {}, {"token_budget": 8192}, precision)
        name = conformance.digest([given, steps])
        if name not in self.made:
            self.made[name] = self.train(model, 1, given, self.folder / name, steps=steps)
        return self.made[name][0]


@pytest.fixture(scope="module")
def made(
    pools: Callable[[int], Pool],
    corpus: str,
    proteins: str,
    vectors: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Table:
    return Table(
        pools, {"cells": corpus, "proteins": proteins}, vectors, tmp_path_factory.mktemp("table")
    )


@pytest.fixture
def table(made: Table, alone: None) -> Iterator[Table]:
    buffered.register()
    yield made
    del plugin.BUILT_IN["family"]["buffered"]


def assert_lines(ranks: list[Trained], expected: list[dict[str, float]], low: bool = False) -> None:
    """Logged lines are the expected ones in every rank; with low precision, their losses nearly."""
    lines = ranks[0]["lines"]
    for rank in ranks:
        assert rank["lines"] == lines, "ranks disagree about a number that is global"
    for line, expected_line in zip(lines, expected, strict=True):
        assert line.keys() == expected_line.keys()
        if low:
            assert line.get("loss") == pytest.approx(expected_line.get("loss"), rel=5e-3)
            continue
        for key, value in expected_line.items():
            rtol = TOLERANCE
            atol = TOLERANCE
            if key in cases.MEASURED:
                rtol = 1e-3
                atol = 1e-6
            if key == "grad_norm":  # of weights that rounding has moved apart in the steps before
                rtol = 4 * TOLERANCE
            # None, a metric without a value, is nan
            found, wanted = np.array([line[key], value], float)
            message = f"{key} of {expected_line}"
            np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, err_msg=message)


@rows(ALL)
def test_curves_equal_those_of_one_process(table: Table, case: Case) -> None:
    expected = table.alone(case.model, case.precision)["lines"]
    low = case.precision != "32-true"
    assert any("val_loss" in line for line in expected)
    assert_lines(table.once(case)[0], expected, low)
    if low:
        assert expected != table.alone(case.model)["lines"], f"{case.precision} computed in float32"


def test_training_logs_the_share_of_labelled_cells(table: Table) -> None:
    def mean_of(model: str, key: str) -> float:
        lines = table.alone(model)["lines"]
        return float(np.mean([line[key] for line in lines if "loss" in line]))

    assert mean_of("classification", "labelled_frac") == 1
    assert mean_of("several heads", "labelled_frac_lot") == 1
    assert 0 < mean_of("several heads", "labelled_frac_kind") < 0.5  # a fifth of the cells
    assert 0.5 < mean_of("several heads", "labelled_frac_age") < 1
    assert "labelled_frac_cell_decoding" not in table.alone("several heads")["lines"][0]
    assert 0.7 < mean_of("student", "labelled_frac_distill") < 1  # six of seven have a vector


def test_the_validation_loss_leaves_out_a_hidden_label(table: Table) -> None:
    lines = table.alone("sum of labels")["lines"]
    for name in ("loss", "val_loss"):
        (*_, line) = (line for line in lines if name in line)
        losses = {part: line[f"{name}_{part}"] for part in SUM_OF_LABELS}
        assert losses["hidden"] > 0.1
        left_out = losses["hidden"] if name == "val_loss" else 0
        assert line[name] == pytest.approx(sum(losses.values()) - left_out, rel=1e-5)


@rows(BEGUN)
def test_first_weights_are_bitwise_those_of_one_process(table: Table, case: Case) -> None:
    expected = dict(table.alone(case.model)["first"])
    found = set()
    for rank in table.once(case)[0]:
        weights = set(rank["first"])
        assert weights <= expected.items()
        if "pp" in case.layout:
            assert len(weights) < len(expected)
        found |= weights
    assert found == expected.items()


@rows(BEGUN)
def test_ranks_end_with_the_same_parameters(table: Table, case: Case) -> None:
    contents: dict[str, str] = {}
    for rank in table.once(case)[0]:
        for name, content in rank["last"]:
            assert contents.setdefault(name, content) == content, "copies of a parameter differ"


@pytest.mark.parametrize("case", CUTS)
def test_splitting_a_step_changes_nothing(table: Table, case: Case) -> None:
    assert_lines(table.once(case)[0], table.alone(case.model)["lines"])


@pytest.mark.parametrize(
    ("case", "chain"),
    [grouped(Case(model, chain[0], ranks), full, chain) for ranks, model, chain, full in CHAINS],
)
def test_a_run_resumes_in_another_layout(
    table: Table, tmp_path: Path, case: Case, chain: list[str]
) -> None:
    each = conformance.EACH
    model = case.model
    expected = table.alone(model, steps=each * len(chain))["lines"]
    for part, layout in enumerate(chain):
        ranks = 1 if layout == "one process" else case.ranks
        given = conformance.spread(Case(model, layout, case.ranks))
        found = table.train(model, ranks, given, tmp_path, steps=each * (part + 1), load=part > 0)
        lines = [line for line in expected if each * part < line["step"] <= each * (part + 1)]
        assert_lines(found, lines)


@rows(EXPORTED, COMBINED[:11])
def test_an_export_is_the_trained_model_to_the_bit(
    table: Table, tmp_path: Path, case: Case
) -> None:
    ranks, folder = table.once(case)
    tensors = cases.exported(table.corpus(case.model), folder, tmp_path)
    digests = {name: conformance.digest_of(tensor.numpy()) for name, tensor in tensors.items()}
    for rank in ranks:
        for name, content in rank["last"]:
            assert digests[name] == content, name


def test_only_persistent_buffers_are_saved(table: Table, tmp_path: Path) -> None:
    _, folder = table.once(BUFFERED)
    persistent = {"order", "blocks.0.scale", "blocks.1.scale", "blocks.2.scale", "blocks.3.scale"}
    newest = max((folder / "checkpoints").iterdir())
    kept = CheckpointReader(newest).read_metadata().state_dict_metadata
    loaded = cases.exported(table.corpus("buffered"), folder, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    in_checkpoint = {name.removeprefix("model.") for name in kept}
    for names in (in_checkpoint, written.keys()):
        assert names >= persistent
        assert "offsets" not in names
    assert loaded.keys() - written.keys() == {"offsets"}
    assert written["order"].dtype == torch.int64
