"""cellmill options searches the options of config/README.md and of installed packages."""

import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from cellmill.cli import main
from cellmill.commands.options import list_options
from cellmill.config import plugin
from cellmill.config.parts.methods import OptimizerConfig
from cellmill.config.shipped import find_shipped


def search(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["options", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_an_option_is_found_by_any_word_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    warmup = (
        "train.warmup_steps: integer, ≥ 0; default 100\n    Steps of linear warm-up from 0 to lr.\n"
    )
    assert search(capsys, "LINEAR", "from 0 to") == (0, warmup, "")
    lr = "train.lr: number, > 0; default 0.001\n    Peak learning rate.\n"
    assert search(capsys, "peak learning")[1] == lr
    assert lr in search(capsys, "learning_rate")[1], "its name in other packages"
    assert "\ntrain.token_budget: " in "\n" + search(capsys, "gradient_accumulation")[1]
    by_name = search(capsys, "val_cells")[1]
    assert by_name.startswith("train.val_cells: "), "options with the word in their name come first"


def test_an_option_of_several_choices_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(capsys, "objective.mask_frac")[1]
    assert found == (
        "objective.mask_frac of masked_value, masked_gene: number, > 0, < 1; default 0.15\n"
        "    Probability with which each token is masked; at least one per cell is.\n"
    )


def test_matches_in_names_come_before_at_most_ten_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *printed, last = search(capsys, "batch")[1].splitlines()
    heads = [line for line in printed if not line.startswith("    ")]
    in_name = ["batch" in head.partition("; default")[0].rpartition(": ")[0] for head in heads]
    named = [option for option in list_options() if "batch" in option.path]
    assert len(heads) == 10
    assert in_name == [True] * len(named) + [False] * (10 - len(named))
    assert re.fullmatch(
        r"… and \d+ more whose help has the word; `cellmill options WORD WORD` narrows", last
    )
    assert (
        search(capsys, "train")[1]
        .splitlines()[-1]
        .endswith(" more; `cellmill options WORD WORD` narrows")
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["zebra"], "no option has 'zebra'"),
        (["warmup", "zebra"], "no option has 'warmup' and 'zebra'"),
        (["warmup_step5"], "no option has 'warmup_step5'; similar names: warmup_steps, "),
    ],
)
def test_no_match_is_one_line_with_similar_names(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    code, out, err = search(capsys, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"cellmill options: {line}")


class Paths(OptimizerConfig):
    """Options with a default that JSON has no type for."""

    implementation = "json:JSONDecoder"
    name: Literal["paths"] = "paths"
    table: Path = Field(Path("rates.tsv"), description="A table.")


class Unlisted(OptimizerConfig):
    """Options of which pydantic makes no schema."""

    implementation = "json:JSONDecoder"
    name: Literal["unlisted"] = "unlisted"
    rate: Callable[[int], float] = Field(float, description="A function.")


def test_options_of_installed_packages_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "toy_momentum": "cellmill_toy.options:ToyMomentum",
        "broken": "no_such_package:X",
        "paths": f"{__name__}:Paths",
        "unlisted": f"{__name__}:Unlisted",
    }
    points = [EntryPoint(name, value, "cellmill.optimizer") for name, value in values.items()]
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugin")
    code, out, err = search(capsys, "optimizer.decay")
    assert code == 0
    assert out.startswith("train.optimizer.decay of toy_momentum: number, ")
    broken, unlisted = err.splitlines()
    assert broken.startswith(
        "options of optimizer 'broken' are not listed: optimizer 'broken': no_such_package:X of"
    )
    assert unlisted.startswith("options of optimizer 'unlisted' are not listed: PydanticInvalidFor")
    path = 'train.optimizer.table of paths: text; default "rates.tsv"\n    A table.\n'
    assert search(capsys, "optimizer.table")[1] == path
    assert "toy_momentum" not in str(list_options()), "config/README.md has those of cellmill alone"
    monkeypatch.delitem(sys.modules, "cellmill_toy.options")


def test_every_documented_key_can_be_searched() -> None:
    tables = find_shipped("config/README.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", tables, re.M))
    assert documented - {"replace"} <= {option.row.key for option in list_options()}
    assert len(documented) > 200
