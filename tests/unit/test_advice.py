"""The page says what to change next, by rules that the tables of docs/quality.md support."""

from pathlib import Path
from typing import Any

import pytest

from cellmill.report.advice import GAINS, find_advice
from cellmill.report.collect import ReportedRun
from cellmill.report.schemas import (
    LoggedLineSchema,
    ModelSchema,
    PlanSchema,
    RunRecordSchema,
    StatusSchema,
)
from cellmill.report.training import compare_with_plan
from cellmill.runs.results import DatasetResult, Evaluation, TaskResult

AHEAD = ["level", "ahead"]
LEVEL = ["level"]
BEHIND = [*["level"] * 19, "behind"]
STEP_300 = Evaluation({}, {"step": 300})
COLLAPSING = [LoggedLineSchema(step=2, effective_rank=1.2)]
SUPERVISED = ModelSchema(supervised_by=["cell_type"])
BASELINES = (
    "with few counts or few measured genes, models were ahead of baselines on two of four datasets, PBMC of few genes "
    "and MERFISH (docs/quality.md, Where a trained model is worth it)"
)
OPTIONS = {
    "objective": {"name": "cell_decoding"},
    "model": {"family": "profile", "hidden": 128},
    "train": {"lr": 5e-3},
}
ENCODER: dict[str, Any] = {
    "tokens": {"tokenizer": "continuous"},
    "stream": {},
    "model": {"family": "encoder"},
    "parallel": {},
    "train": {"steps": 1600},
}


def advised(options: dict[str, Any], outcomes: list[str] = AHEAD, **files: Any) -> str:
    given: dict[str, Any] = {
        "plan": PlanSchema(steps=1600, steps_per_epoch=20),
        "status": StatusSchema(step=1600),
    }
    given |= {"exported_model": None, "evaluation": Evaluation({}, {"step": 1600})} | files
    record = RunRecordSchema.model_validate({"options": OPTIONS | options})
    return find_advice(ReportedRun("run", run_record=record, **given), outcomes)


@pytest.mark.parametrize(
    ("options", "files", "said"),
    [
        ({}, {}, "train it with other seeds, in a sweep over train.seed"),
        ({}, {"evaluation": None}, "run the workflow to its end: the run has no result yet"),
        ({}, {"outcomes": []}, "name the label, batch or other columns that its tasks need"),
        (
            {},
            {"logged_lines": [LoggedLineSchema(step=1, effective_rank=9.0), *COLLAPSING]},
            "lower train.lr: the embedding has coll",
        ),
        (
            {"objective": {"name": "cell_decoding", "batch_column": "b", "batch_adversary": 0.1}},
            {"logged_lines": COLLAPSING},
            "lower objective.batch_adversary_scale, or train.lr: the embedding has collapsed to one direction",
        ),
        (
            ENCODER | {"objective": {"name": "masked_value"}},
            {},
            "set objective: cell_decoding; on three of four datasets, two-layer encoders trained only with "
            "masked_value scored 0.12 to 0.33 lower in accuracy than logistic regression on all genes",
        ),
        (
            ENCODER | {"objective": {"name": "masked_gene"}, "tokens": {"tokenizer": "rank"}},
            {},
            "set objective: {name: cell_decoding, view: drop}; on three of four datasets,",
        ),
        # the checks refuse cell_decoding of sequences, and with tokens of genes without counts
        (
            ENCODER | {"objective": {"name": "masked_gene"}, "tokens": {"tokenizer": "sequence"}},
            {},
            "train it with other seeds",
        ),
        (
            ENCODER
            | {
                "objective": {"name": "masked_value"},
                "tokens": {"tokenizer": "continuous", "zero_frac": 0.1},
            },
            {},
            "train it with other seeds",
        ),
        (
            ENCODER | {"objective": {"name": "next_gene"}, "model": {"family": "autoregressive"}},
            {},
            "train it with other seeds",
        ),
        (
            {"model": {"family": "profile", "hidden": 512}},
            {},
            "lower train.lr to 0.001: at a width of 512, the mean of three accuracies on two datasets was 0.007 to "
            "0.011 lower with 0.005 or 0.01 than with 0.001, in one seed",
        ),
        (
            {},
            {"plan": PlanSchema(steps=390, steps_per_epoch=13)},
            "set train.steps: auto, which is 1,600 steps and not 390, and train anew (--restart); with 32 cells a "
            "step, from 400 to 1,600 steps, "
            "accuracy changed by +0.013, which may be chance (95 % interval -0.007 to +0.034)",
        ),
        ({}, {"plan": PlanSchema(steps=390)}, "train it with other seeds"),
        (
            {"train": {"epochs": 2}},
            {"plan": PlanSchema(steps=26, steps_per_epoch=13)},
            "set train.steps: auto in place of train.epochs, which is 1,600 steps and not 26, and",
        ),
        (
            {},
            {"plan": PlanSchema(steps=1600, steps_per_epoch=900)},
            "set train.steps: auto, which is 2,700 steps and not 1,600",
        ),
        (
            {},
            {"evaluation": STEP_300, "status": StatusSchema(step=1600, best_step=300)},
            "set consolidate.checkpoint: last; the exported checkpoint is of step 300",
        ),
        # exported for unmeasured genes, as docs/objectives.md advises
        (
            {"train": {"best_metric": "val_hidden_genes"}},
            {"evaluation": STEP_300, "status": StatusSchema(step=1600, best_step=300)},
            "train it with other seeds",
        ),
        # a step of train.keep_steps
        (
            {},
            {"evaluation": STEP_300, "status": StatusSchema(step=1600, best_step=400)},
            "train it with other seeds",
        ),
        (
            {},
            {"outcomes": LEVEL},
            "take the best baseline, which costs less: of 1 comparison with it, the model is ahead in none and behind "
            f"in none; {BASELINES}",
        ),
        (
            {},
            {"outcomes": BEHIND},
            "take the best baseline, which costs less: of 20 comparisons with it, the model is ahead in none and "
            f"behind in 1; {BASELINES}",
        ),
        ({}, {"outcomes": ["undecided", "undecided"]}, "train it with other seeds"),
        # lengths were measured without labels
        (
            {},
            {"exported_model": SUPERVISED, "plan": PlanSchema(steps=9, steps_per_epoch=3)},
            "train it with other seeds",
        ),
        # two labels need no second direction
        (
            {},
            {"exported_model": SUPERVISED, "logged_lines": COLLAPSING},
            "train it with other seeds",
        ),
    ],
)
def test_each_rule_has_one_sentence(
    options: dict[str, Any], files: dict[str, Any], said: str
) -> None:
    assert advised(options, **files).startswith(said)


def test_a_collapsed_embedding_is_named_before_steps() -> None:
    few = advised({}, logged_lines=COLLAPSING, plan=PlanSchema(steps=60, steps_per_epoch=400))
    assert few.startswith("lower train.lr:")


def test_a_collapse_after_the_evaluated_step_does_not_count() -> None:
    def rank(step: int, value: float) -> LoggedLineSchema:
        return LoggedLineSchema(step=step, effective_rank=value)

    evaluated = Evaluation({}, {"step": 200})
    late = advised({}, logged_lines=[rank(200, 9.0), rank(2000, 1.3)], evaluation=evaluated)
    assert "collapsed" not in late
    early = advised({}, logged_lines=[rank(200, 1.3), rank(2000, 9.0)], evaluation=evaluated)
    assert "the embedding has collapsed" in early


def test_only_runs_without_labels_are_called_collapsed() -> None:
    name = "effective rank of the embedding, last validation"
    for model, addition in ((None, ": collapsed to one direction"), (SUPERVISED, "")):
        run = ReportedRun("run", None, None, None, model, None, logged_lines=COLLAPSING)
        assert f"{name}{addition}" in [row.name for row in compare_with_plan(run)]


def batches(n: int = 2, skipped: str | None = None, task: str = "integration") -> Evaluation:
    result = TaskResult([], figures={"n_batches": n}, skipped=skipped)
    dataset = DatasetResult(9, 9, "heldout", 0, {}, {task: result})
    return Evaluation({"a": dataset}, {"step": 1600})


def test_batches_that_the_model_does_not_know_are_named() -> None:
    said = (
        "set objective.batch_column: auto, so that the embedding need not contain the batch: on CellBench, "
        "batches then mixed better than with Harmony, and accuracy with 5 labels per class changed by +0.006, which "
        "may be chance (95 % interval -0.001 to +0.013)"
    )
    assert advised({}, evaluation=batches()) == said
    for objective in (
        {"name": "cell_decoding", "batch_column": "batch"},
        {"name": "cell_decoding", "batch_reason": "none: batch has 1 value"},
        {"name": "masked_value"},
    ):
        assert "batch_column" not in advised({"objective": objective}, evaluation=batches())
    assert "batch_column" not in advised({}, evaluation=batches(1, "one batch"))
    assert "batch_column" not in advised({}, evaluation=batches(), exported_model=SUPERVISED)


@pytest.mark.parametrize(
    "evaluation", [batches(skipped="too few labels"), batches(task="integration of type")]
)
def test_several_batches_are_found_without_the_first_label(evaluation: Evaluation) -> None:
    assert "set objective.batch_column: auto" in advised({}, evaluation=evaluation)


@pytest.mark.parametrize("change", GAINS)
def test_gains_are_those_of_the_documentation(change: str) -> None:
    text = Path("docs/quality.md").read_text(encoding="utf-8")
    section = text.partition("## What to change first\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(f"| {change}")]
    gain = "{:+.3f} ({:+.3f} to {:+.3f})".format(*GAINS[change]).replace("0.", ".")
    assert [gain in row for row in rows] == [True]
    assert GAINS[change].low < 0 < GAINS[change].high
