"""Sweeps are the product of their values, each run as if it were written out."""

import re
from copy import deepcopy
from itertools import product
from typing import Any

import pytest

from cellmill.config import Workflow, check_config
from cellmill.errors import ConfigError
from cellmill.runs.identity import check_branches

BASE: dict[str, Any] = {
    "corpora": {"demo": {"table": "config/datasets.tsv"}},
    "train": {"epochs": 2, "global_batch": 32},
}
SWEEP: dict[str, Any] = {
    "run": {"corpus": "demo", "train": {"lr": 0.01}},
    "over": {
        "stream.train_frac": [0.1, 1],
        "layout": {
            "ddp": {"parallel.strategy": "ddp"},
            "pp": {"parallel.pp": 2, "model.family": "encoder"},
        },
        "train.seed": [0, 1],
    },
}


def checked(runs: dict[str, Any], sweep: dict[str, Any] | None = None) -> Workflow:
    return check_config(BASE | {"runs": runs, "sweep": sweep or {}}, "test")


def test_a_sweep_is_its_runs_written_out() -> None:
    layouts = {
        "ddp": {"parallel": {"strategy": "ddp"}},
        "pp": {"parallel": {"pp": 2}, "model": {"family": "encoder"}},
    }
    run: dict[str, Any] = {"corpus": "demo", "train": {"lr": 0.01}}
    written = {
        f"size-train_frac{frac}-{layout}-seed{seed}": run
        | {"train": run["train"] | {"seed": seed}, "stream": {"train_frac": frac}}
        | layouts[layout]
        for frac, layout, seed in product((0.1, 1), layouts, (0, 1))
    }
    before = deepcopy(SWEEP)
    swept = checked({"own": {"corpus": "demo"}}, {"size": SWEEP})
    assert swept.runs == checked({"own": {"corpus": "demo"}, **written}).runs
    assert before == SWEEP
    values = swept.swept()["size"]
    assert list(values) == list(written)
    assert values["size-train_frac0.1-pp-seed1"] == {
        "stream.train_frac": 0.1,
        "layout": "pp",
        "train.seed": 1,
    }
    assert len(check_config(BASE | {"sweep": {"size": SWEEP}}).runs) == 8  # no `runs` beside it


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"run": None}, r"sweep\.a\.run: expected a mapping, got None"),
        (
            {"over": {"train.seed": 3}},
            r"sweep\.a\.over\.train\.seed: expected a list of values, or .*, got 3",
        ),
        (
            {"over": {"train.seed": [3, 3]}},
            r"sweep\.a: two runs are called a-seed3; give one of its values",
        ),
        (
            {"over": {"model": [{"hidden": 3}]}},
            r"expected a list of values, or \{NAME: \{OPTION: VALUE\}\}, got",
        ),
        ({"over": {"init_from": ["./x"]}}, "is no name; use letters, .*; name its"),
        (
            {"over": {"train.sed": [0]}},
            r"runs\.a-sed0\.train: unknown key 'sed'; did you mean .*seed",
        ),
        ({"over": {"metric": [0]}}, r"sweep\.a\.over\.metric: is a column of results\.csv"),
        ({"over": {f"train.{k}": list(range(99)) for k in "abc"}}, "970,299 runs; leave"),
        ({"x": 1}, r"sweep\.a: unknown key 'x'"),
    ],
)
def test_a_wrong_sweep_is_named(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked({}, {"a": {"run": {"corpus": "demo"}, "over": {"train.seed": [0]}} | sweep})


def test_runs_of_a_sweep_branch_from_one_trunk() -> None:
    points = {
        f"s{n}": {"train.steps": n, "train.epochs": None, "trunk_step": n - 80} for n in (400, 800)
    }
    sweep = {"length": {"run": {"corpus": "demo", "trunk": "long"}, "over": {"length": points}}}
    given = checked(
        {"long": {"corpus": "demo", "train": {"schedule": "wsd", "keep_steps": [320, 720]}}}, sweep
    )
    branches = [(name, run.trunk, run.trunk_step) for name, run in given.runs.items() if run.trunk]
    assert branches == [("length-s400", "long", 320), ("length-s800", "long", 720)]
    with pytest.raises(
        ConfigError, match=r"trunk_step: 320 is not in train.keep_steps of long \(\[\]\)"
    ):
        checked({"long": {"corpus": "demo"}}, sweep)


@pytest.mark.parametrize(
    ("end", "branch", "message"),
    [
        (300, {"steps": 900}, "trunk_step: 400 is behind the last step of long (300)"),
        (
            2000,
            {"steps": 400},
            "runs.short.train.steps: expected more than its trunk_step, 400, got 400",
        ),
        (2000, {"steps": 450}, "runs.short: step 361 has learning rate"),
        (
            2000,
            {"steps": 900, "seed": 4},
            "runs.short.train.seed: expected 0, as its trunk long, got 4; make them",
        ),
    ],
)
def test_an_impossible_branch_is_refused_before_its_trunk_trains(
    end: int, branch: dict[str, Any], message: str
) -> None:
    runs = {
        "long": {"corpus": "demo", "train": {"schedule": "wsd", "steps": end, "keep_steps": [400]}},
        "short": {
            "corpus": "demo",
            "trunk": "long",
            "trunk_step": 400,
            "train": {"schedule": "wsd"} | branch,
        },
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_branches(checked(runs), "test")


def test_a_run_of_automatic_length_is_a_trunk_with_a_branch() -> None:
    train = {"schedule": "wsd", "steps": "auto", "keep_steps": [400]}
    runs = {
        "long": {"corpus": "demo", "train": train},
        "short": {
            "corpus": "demo",
            "trunk": "long",
            "trunk_step": 400,
            "train": train | {"steps": 500},
        },
        "again": {"corpus": "demo", "trunk": "short", "trunk_step": 400, "train": train},
    }
    check_branches(checked(runs), "test")  # their rates are compared when they begin
