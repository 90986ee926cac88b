"""Options of objectives: pairs with a family, which the documentation lists, and former names."""

import re
from pathlib import Path
from typing import Any

import pytest

from cellmill.config.checks import check_together
from cellmill.config.load import check_options
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.plugin import BUILT_IN
from cellmill.errors import UserError
from tests.checks import refused
from tests.models import train_options

DOCUMENT = Path(__file__).parents[2] / "docs" / "objectives.md"
OPTIONS: dict[str, dict[str, Any]] = {
    "classification": {"label_column": "kind"},
    "supervised_contrastive": {"label_column": "kind"},
    "regression": {"target_column": "age"},
    "distill": {"teacher": "big"},
    "perturbation_response": {"control": "none"},
    "cell_decoding": {"view": "drop"},  # suits every tokenizer of cells
}
MODELS = {"hf": {"architecture": {"model_type": "esm"}, "weights": "random"}}
OF_EVERY_FAMILY = {"classification", "regression", "distill"}


def _is_accepted(family: str, objective: str, tokenizer: str) -> bool:
    options = {"name": objective} | OPTIONS.get(objective, {})
    if objective.startswith("masked"):
        options["cell_loss_weight"] = 0  # as family hf requires
    model = {"family": family} | MODELS.get(family, {})
    try:
        check_together(
            train_options(model=model, objective=options, tokens={"tokenizer": tokenizer})
        )
    except UserError:
        return False
    return True


def test_the_documentation_lists_the_objectives_of_each_family() -> None:
    names = {*BUILT_IN["objective"]} - {"sum"}
    documented = {}
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition("\n## Valid combinations\n")
    for family, text in re.findall(r"^- `(\w+)`(.*?)(?=\n- |\n\n)", section, re.M | re.S):
        if family not in BUILT_IN["family"]:
            continue
        _, _, listed = text.partition("):")
        listed_names = {*re.findall(r"`(\w+)`", listed)}
        is_exception = "all objectives but" in listed
        documented[family] = names - listed_names if is_exception else listed_names
        documented[family] |= OF_EVERY_FAMILY
    accepted = {}
    for family in BUILT_IN["family"]:
        accepted[family] = {
            name
            for name in names
            if any(_is_accepted(family, name, tokenizer) for tokenizer in BUILT_IN["tokenizer"])
        }
    assert documented == accepted


@pytest.mark.parametrize(
    ("former", "value", "name"),
    [("hides_tokens", True, "owns_tokens"), ("each", lambda options: [options], "all_parts")],
)
def test_former_names_in_options_of_a_package_are_refused(
    former: str, value: Any, name: str
) -> None:
    with refused(f"{__name__}.Old.{former}: expected {name}, its new name; rename it"):
        type("Old", (ObjectiveConfig,), {former: value, "__module__": __name__})


def test_former_names_of_options_that_models_stored_are_read() -> None:
    former = {"name": "regression", "target_column": "age", "number_hidden": 8}
    options = ObjectiveConfig.model_validate(former | {"number_dropout": 0.3}).model_dump()
    assert (options["head_hidden"], options["head_dropout"]) == (8, 0.3)
    assert ObjectiveConfig.model_validate(options).model_dump() == options
    with refused(
        "objective: number_hidden is the former name of head_hidden: set head_hidden alone"
    ):
        check_options(ObjectiveConfig, former | {"head_hidden": 16}, "objective")
