"""The page says what to change next, by rules that the tables of docs/quality.md support."""

from typing import Any

import pytest

from cellmill.report.advice import advise
from cellmill.report.collect import ReportedRun
from cellmill.runs.results import Evaluation

AHEAD = ["level", "ahead"]
LEVEL = ["level"]
BEHIND = ["level", "behind"]
OPTIONS = {
    "objective": {"name": "cell_decoding"},
    "model": {"family": "profile", "hidden": 128},
    "train": {"lr": 5e-3},
}


def advised(options: dict[str, Any], outcomes: list[str] = AHEAD, **files: Any) -> list[str]:
    given: dict[str, Any] = {
        "plan": {"steps": 1600, "steps_per_epoch": 20},
        "status": {"step": 1600},
    }
    given |= {"model": None, "evaluation": Evaluation({}, {"step": 1600})} | files
    return list(
        advise(ReportedRun("run", run_record={"options": OPTIONS | options}, **given), outcomes)
    )


@pytest.mark.parametrize(
    ("options", "files", "said"),
    [
        ({}, {}, None),
        (
            {},
            {"metric_lines": [{"effective_rank": 9.0}, {"effective_rank": 1.2}]},
            "lower train.lr: the embedding has coll",
        ),
        (
            {"objective": {"name": "masked_value"}},
            {},
            "set objective: cell_decoding; masked_value alone was",
        ),
        (
            {"model": {"family": "profile", "hidden": 512}},
            {},
            "lower train.lr to 0.001: at a width of 512",
        ),
        (
            {},
            {"plan": {"steps": 390, "steps_per_epoch": 13}},
            "set train.steps: auto, 1,600 in place of 390",
        ),
        (
            {},
            {"plan": {"steps": 1600, "steps_per_epoch": 900}},
            "set train.steps: auto, 2,700 in place of 1,600",
        ),
        (
            {},
            {"evaluation": Evaluation({}, {"step": 300})},
            "set consolidate.checkpoint: last: the exported one is of step 300",
        ),
        ({}, {"outcomes": LEVEL}, "take the best baseline: it is as good on these cells"),
        ({}, {"outcomes": BEHIND}, "take the best baseline: it is better on these cells"),
        # lengths were measured without labels
        (
            {},
            {"model": {"supervised_by": ["cell_type"]}, "plan": {"steps": 9, "steps_per_epoch": 3}},
            None,
        ),
        # two labels need no second direction
        (
            {},
            {"model": {"supervised_by": ["cell_type"]}, "metric_lines": [{"effective_rank": 1.2}]},
            None,
        ),
    ],
)
def test_each_rule_has_one_sentence(
    options: dict[str, Any], files: dict[str, Any], said: str | None
) -> None:
    sentences = advised(options, **files)
    assert len(sentences) == (said is not None)
    assert not said or sentences[0].startswith(said)


def test_more_steps_are_advised_before_another_rate() -> None:
    few = advised(
        {}, metric_lines=[{"effective_rank": 1.2}], plan={"steps": 60, "steps_per_epoch": 400}
    )
    assert [sentence.split(":")[0] for sentence in few] == ["set train.steps", "lower train.lr"]
