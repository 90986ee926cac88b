"""Sizes by name: their numbers, what wins beside them, and the parameters that the documentation states."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cellmill.config.load import check_config, check_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import HEAD_WIDTH, HIDDEN_AND_LAYERS, FamilyConfig, numbers
from cellmill.errors import ConfigError
from cellmill.planner.size import measure
from cellmill.runs.identity import identity
from tests.house.documents import documentation
from tests.models import spec

SECTIONS: dict[str, Any] = {"tokens": {}, "stream": {}, "parallel": {}, "train": {"steps": 1}}


@pytest.mark.parametrize("family", ["encoder", "autoencoder"])
def test_a_run_by_size_is_the_run_with_its_numbers(family: str) -> None:
    by_name, by_numbers = (
        TrainOptions.model_validate(SECTIONS | {"model": {"family": family} | model})
        for model in ({"size": "51M"}, {"hidden": 512, "layers": 12, "heads": 8})
    )
    assert identity(by_name, None) == identity(by_numbers, None)
    assert by_name.model_dump() == by_numbers.model_dump()
    assert "size" not in by_name.model.model_dump()


def test_explicit_keys_win_and_a_runs_own_size_replaces_the_numbers_at_the_top() -> None:
    assert (
        FamilyConfig.model_validate({"size": "10M", "layers": 2, "heads": 8}).model_dump().items()
        >= {
            "hidden": 256,
            "layers": 2,
            "heads": 8,
        }.items()
    )
    tree = {
        "corpora": {"a": {}},
        "model": {"hidden": 128, "layers": 2, "dropout": 0.1},
        "train": {"steps": 1},
        "runs": {
            "named": {"corpus": "a", "model": {"size": "10M"}},
            "shallow": {"corpus": "a", "model": {"size": "10M", "layers": 1}},
            "same": {"corpus": "a"},
        },
    }
    runs = check_config(tree).runs
    found = {name: (m.hidden, m.layers, m.heads, m.dropout) for name, m in ((n, run.model) for n, run in runs.items())}  # type: ignore[attr-defined]
    assert found == {"named": (256, 6, 4, 0.1), "shallow": (256, 1, 4, 0.1), "same": (128, 2, 4, 0.1)}


def test_an_unknown_size_is_answered_with_the_names() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(FamilyConfig, {"size": "50M"}, "config.yaml")
    names = "'10M', '51M', '106M', '300M', '1B' or '3B'"
    assert str(error.value) == f"config.yaml: size: input should be {names}, got '50M'"


@pytest.mark.full
def test_the_documentation_states_the_numbers_and_the_parameters_that_plan_counts() -> None:
    rows = dict(re.findall(r"^\| `(\d+[MB])` \| (.*) \|$", documentation(), re.M))
    assert list(rows) == list(HIDDEN_AND_LAYERS)
    for name in HIDDEN_AND_LAYERS:
        of = numbers(name)
        size = measure(spec(20_000, family="encoder", objective="cell_decoding", **of))
        encoder, decoder = size.parameters - size.finish.parameters, size.finish.parameters
        assert of["hidden"] == HEAD_WIDTH * of["heads"]
        stated = (of["hidden"], of["layers"], of["heads"], f"{encoder / 1e6:,.1f}", f"{decoder / 1e6:.1f}")
        assert rows[name] == " | ".join(map(str, stated))
