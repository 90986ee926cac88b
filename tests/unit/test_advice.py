"""The page says what to change next, by rules that the tables of docs/quality.md support."""

from typing import Any

import pytest

from cellmill.report.advice import advise
from cellmill.report.collect import ReportedRun
from cellmill.report.forms import LoggedLine, ModelForm, PlanForm, RunRecordForm, StatusForm
from cellmill.runs.results import Evaluation

AHEAD = ["level", "ahead"]
LEVEL = ["level"]
BEHIND = ["level", "behind"]
COLLAPSING = [LoggedLine(step=2, effective_rank=1.2)]
SUPERVISED = ModelForm(supervised_by=["cell_type"])
OPTIONS = {
    "objective": {"name": "cell_decoding"},
    "model": {"family": "profile", "hidden": 128},
    "train": {"lr": 5e-3},
}


def advised(options: dict[str, Any], outcomes: list[str] = AHEAD, **files: Any) -> list[str]:
    given: dict[str, Any] = {
        "plan": PlanForm(steps=1600, steps_per_epoch=20),
        "status": StatusForm(step=1600),
    }
    given |= {"model": None, "evaluation": Evaluation({}, {"step": 1600})} | files
    record = RunRecordForm.model_validate({"options": OPTIONS | options})
    return list(advise(ReportedRun("run", run_record=record, **given), outcomes))


@pytest.mark.parametrize(
    ("options", "files", "said"),
    [
        ({}, {}, "train it with other seeds, in a sweep over train.seed"),
        ({}, {"evaluation": None}, "run the workflow to its end: the run has no result yet"),
        ({}, {"outcomes": []}, "name the label, batch or other columns that its tasks need"),
        (
            {},
            {"logged": [LoggedLine(step=1, effective_rank=9.0), *COLLAPSING]},
            "lower train.lr: the embedding has coll",
        ),
        (
            {"objective": {"name": "masked_value"}},
            {},
            "set objective: cell_decoding; models trained only by masked_value were",
        ),
        (
            {"model": {"family": "profile", "hidden": 512}},
            {},
            "lower train.lr to 0.001: from a width of 512",
        ),
        (
            {},
            {"plan": PlanForm(steps=390, steps_per_epoch=13)},
            "set train.steps: auto, which is 1,600 steps and not 390",
        ),
        (
            {},
            {"plan": PlanForm(steps=1600, steps_per_epoch=900)},
            "set train.steps: auto, which is 2,700 steps and not 1,600",
        ),
        (
            {},
            {"evaluation": Evaluation({}, {"step": 300})},
            "set consolidate.checkpoint: last; the exported checkpoint is of step 300",
        ),
        (
            {},
            {"outcomes": LEVEL},
            "take the best baseline: it is as good as the model on these cells",
        ),
        (
            {},
            {"outcomes": BEHIND},
            "take the best baseline: it is better than the model on these cells",
        ),
        # lengths were measured without labels
        (
            {},
            {"model": SUPERVISED, "plan": PlanForm(steps=9, steps_per_epoch=3)},
            "train it with other seeds",
        ),
        # two labels need no second direction
        (
            {},
            {"model": SUPERVISED, "logged": COLLAPSING},
            "train it with other seeds",
        ),
    ],
)
def test_each_rule_has_one_sentence(
    options: dict[str, Any], files: dict[str, Any], said: str
) -> None:
    first, *others = advised(options, **files)
    assert first.startswith(said)
    assert [other.split(":")[0] for other in others] in (
        [],
        ["train it with other seeds, in a sweep over train.seed"],
    )


def test_a_collapsed_embedding_is_named_before_steps() -> None:
    few = advised({}, logged=COLLAPSING, plan=PlanForm(steps=60, steps_per_epoch=400))
    assert [sentence.split(":")[0] for sentence in few][:2] == ["lower train.lr", "set train.steps"]
