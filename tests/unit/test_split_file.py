"""Split files of perturbations: forms, names, faults, groups that are scored apart, and sums of parts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.errors import DataError
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.baselines import sum_changes_of_parts
from cellmill.evaluate.tasks.perturbation.change_scores import score_changes
from cellmill.evaluate.tasks.perturbation.changes_file import write_changes
from cellmill.evaluate.tasks.perturbation.folds import divide_by_novelty
from cellmill.evaluate.tasks.perturbation.predictions import ChangePredictor
from cellmill.evaluate.tasks.perturbation.profiles import REFERENCE_HALF
from cellmill.evaluate.tasks.perturbation.split_file import SplitFile
from cellmill.evaluate.tasks.perturbation.task import Perturbation
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits

NAMES = ("A", "B", "C", "D", "A+B", "A+C", "C+D", "control")
TOML = """
[datasets]
simulated = "/data/simulated"
[training]
simulated = "train"
[zeroshot]
"simulated.z" = "test"
"other.z" = "val"
[fewshot."simulated.y"]
val = ["B", "C"]
test = ["C", "A+B"]
"""
TABLE = """perturbation,context,split
,x,train
,y,train
,z,test
B,y,val
C+ctrl,y,test
B_A,y,test
"""
LISTS = {
    "train": ["ctrl", "A+ctrl", "ctrl+C", "C+A"],
    "val": ["B+ctrl"],
    "test": ["D+ctrl", "A+B", "C_D"],
}


@pytest.fixture(scope="module")
def screen(context: Context) -> Context:
    """Four perturbations, three combinations and controls in three cell lines; all may be tested."""
    number = np.arange(context.reader.n_obs)
    perturbation = pd.Series(np.array(NAMES)[number % 8])
    lines = pd.Series(np.array(["x", "y", "z"])[number // 8 % 3], name="cell_line")
    roles = {
        "perturbation": perturbation,
        "is_control": perturbation == "control",
        "label": lines,
    }
    return replace(context, roles=roles, scored=np.ones(len(number), bool))


def config_of(path: Path, **options: Any) -> PerturbationConfig:
    return PerturbationConfig(split_file=str(path), min_cells=4, top_genes=5, **options)


def hold_out(screen: Context, path: Path, text: str, **options: Any) -> PerturbedUnits:
    path.write_text(text)
    config = config_of(path, **options)
    return PerturbedUnits.read(screen, config, "perturbation", SplitFile.read(config, screen))


def splits_of(held: PerturbedUnits) -> dict[str, str]:
    return dict(zip(held.unit_names, held.split_of_unit.tolist(), strict=True))


def groups_of(held: PerturbedUnits) -> dict[str, list[str]]:
    groups = {}
    for group, [fold] in divide_by_novelty(held).items():
        groups[group] = [held.unit_names[unit] for unit in fold.tested]
    return groups


def test_cell_load_and_a_table_say_the_same(screen: Context, tmp_path: Path) -> None:
    held = hold_out(screen, tmp_path / "split.toml", TOML)
    table = hold_out(screen, tmp_path / "split.csv", TABLE)
    expected = {}
    for name in NAMES[:-1]:
        expected[f"{name} | x"] = "train"
        expected[f"{name} | y"] = "train"
        expected[f"{name} | z"] = "test"
    # C is validated and tested on, as cell-load allows
    expected |= {"B | y": "val", "C | y": "test", "A+B | y": "test"}
    assert splits_of(held) == splits_of(table) == expected
    assert groups_of(held) == groups_of(table)
    assert groups_of(held)["few-shot"] == ["A+B | y", "C | y"]
    assert groups_of(held)["zero-shot"] == [f"{name} | z" for name in sorted(NAMES[:-1])]


def test_lists_of_gears_are_grouped_by_trained_parts(screen: Context, tmp_path: Path) -> None:
    held = hold_out(screen, tmp_path / "split.json", json.dumps(LISTS))
    assert splits_of(held) == {
        "A": "train",
        "A+B": "test",
        "A+C": "train",
        "B": "val",
        "C": "train",
        "C+D": "test",
        "D": "test",
    }
    # B was validated on only: of A+B, one part was seen
    assert groups_of(held) == {"1 of 2 seen": ["A+B", "C+D"], "new perturbation": ["D"]}
    subgroups = {"train": ["B", "C"], "combo_seen2": ["A+B"], "combo_seen1": ["C+D"]}
    again = hold_out(screen, tmp_path / "split.json", json.dumps(subgroups))
    assert groups_of(again) == {"1 of 2 seen": ["A+B", "C+D"]}
    result = Perturbation(again.config).run(screen)
    assert result.notes[0] == (
        f"1 units that {tmp_path / 'split.json'} counts as 2 of 2 seen, the first A+B, are scored as 1 of 2 "
        "seen, by the perturbations in train."
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A", "A"),
        ("A+ctrl", "A"),
        ("non-targeting_A", "A"),
        ("B+A", "A+B"),
        ("B_A", "A+B"),
        ("B,A", "A+B"),
        ("A || B", "A+B"),
        ("control+B|A", None),  # two delimiters
        ("A+", "A"),
        ("b", None),
    ],
)
def test_names_are_matched_by_their_parts_only(
    screen: Context, tmp_path: Path, text: str, name: str | None
) -> None:
    lists = json.dumps({"train": ["D"], "test": [text]})
    if name is None:
        with pytest.raises(DataError, match="no cell has the perturbation"):
            hold_out(screen, tmp_path / "split.json", lists)
    else:
        held = hold_out(screen, tmp_path / "split.json", lists)
        tested = [unit for unit, split in splits_of(held).items() if split == "test"]
        assert tested == [name]


def test_combinations_with_another_delimiter_are_named(screen: Context, tmp_path: Path) -> None:
    perturbation = screen.roles["perturbation"].replace({"A+B": "A*B"})
    other = replace(screen, roles={**screen.roles, "perturbation": perturbation})
    lists = json.dumps({"train": ["A", "B"], "test": ["A*B", "D"]})
    held = hold_out(other, tmp_path / "split.json", lists)
    assert groups_of(held) == {"new perturbation": ["A*B", "D"]}
    divided = hold_out(other, tmp_path / "split.json", lists, combination_delimiter="*")
    assert groups_of(divided) == {"2 of 2 seen": ["A*B"], "new perturbation": ["D"]}
    underscored = screen.roles["perturbation"].replace({"A+B": "A_B"})
    other = replace(screen, roles={**screen.roles, "perturbation": underscored})
    config = config_of(tmp_path / "split.json")
    (tmp_path / "split.json").write_text(json.dumps({"train": ["A", "B"], "test": ["A_B", "D"]}))
    assert Perturbation(config).run(other).notes[0] == (
        "1 perturbations, the first A_B, have the names of two others but count as one; if they are combinations, set "
        "combination_delimiter."
    )


FAULTS = {
    "unknown perturbation": (
        "s.json",
        '{"train": ["A"], "test": ["Q"]}',
        r"list 'test': no cell has the perturbation 'Q'; there are: ",
    ),
    "misspelled perturbation": (
        "s.csv",
        "perturbation,split\nA,train\na,test\n",
        r"line 3: no cell has the perturbation 'a'; did you mean 'A'\?$",
    ),
    "two splits": (
        "s.json",
        '{"train": ["A", "B"], "test": ["ctrl+A"]}',
        r"list 'test': 'ctrl\+A' is in test, and in train above; leave it in one$",
    ),
    "val and test of a table": (
        "s.csv",
        "perturbation,split\nA,val\nA,test\n",
        r"line 3: 'A' is in test, and in val above",
    ),
    "two splits of a context": (
        "s.toml",
        TOML + '[fewshot."simulated.z"]\ntest = []\n',
        r"\[fewshot\.'simulated\.z'\]: 'z' is in train, and in test above",
    ),
    "no test": (
        "s.json",
        '{"train": ["A"], "test": []}',
        r"split test is empty: none of its perturbations has enough cells",
    ),
    "no train": ("s.json", '{"test": ["A"]}', r"split train is empty"),
    "split": (
        "s.csv",
        "perturbation,split\nA,holdout\n",
        r"line 2: expected a split \(train, val, test, unseen_single, .*\), got 'holdout'$",
    ),
    "context": (
        "s.csv",
        "perturbation,context,split\nA,w,test\n",
        r"line 2: no cell of simulated has label 'w' \(split_context\); there are: ",
    ),
    "context without a line": (
        "s.csv",
        "perturbation,context,split\n,x,train\n,y,test\n",
        r"expected a split for label 'z', got none; add a line for it",
    ),
    "column": (
        "s.tsv",
        "perturbation\tsplits\nA\ttest\n",
        r"s\.tsv: no column 'split'; did you mean 'splits'\?$",
    ),
    "short line": (
        "s.csv",
        "perturbation,split\nA\n",
        r"line 2: expected 2 values as in the header$",
    ),
    "long line": (
        "s.csv",
        "perturbation,split\nA,B,test\n",
        r"line 2: expected 2 values as in the header$",
    ),
    "empty line": (
        "s.csv",
        "perturbation,split\n,test\n",
        r"line 2: expected a perturbation or a context, got neither$",
    ),
    "empty file": ("s.csv", "", r"no column 'perturbation'; there are: none$"),
    "quote": ("s.csv", 'perturbation,split\n"A,test\n', r"not a valid \.csv file"),
    "TOML": ("s.toml", "[fewshot", r"not a valid \.toml file"),
    "unquoted key": (
        "s.toml",
        "[zeroshot]\nsimulated.z = 'test'\n",
        r"zeroshot\.simulated: Input should be a valid string, got \{'z': 'test'\}; a name with a dot needs quotes",
    ),
    "JSON": ("s.json", "{", r"not valid JSON"),
    "lists": ("s.json", '{"train": "A"}', r"train: Input should be a valid list, got 'A'"),
    "pickle": (
        "s.pkl",
        "",
        r"expected \.toml, \.json, \.tsv or \.csv, got '\.pkl'; a pickle is not read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_split_file_is_one_line(screen: Context, tmp_path: Path, fault: str) -> None:
    name, text, message = FAULTS[fault]
    with pytest.raises(DataError, match=message) as raised:
        divide_by_novelty(hold_out(screen, tmp_path / name, text))
    assert str(raised.value).startswith(str(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_a_missing_role_or_dataset_is_named(screen: Context, tmp_path: Path) -> None:
    message = (
        "name one in the table of datasets, or set split_context of task perturbation to a role"
    )
    message = rf"has no column donor; {message} that it has \(label\)$"
    with pytest.raises(DataError, match=message):
        hold_out(screen, tmp_path / "split.csv", TABLE, split_context="donor")
    with pytest.raises(DataError, match="no such file"):
        SplitFile.read(config_of(tmp_path / "none.csv"), screen)
    with pytest.raises(Skipped, match=r"no dataset 'simulated'; there are: other$"):
        hold_out(screen, tmp_path / "split.toml", '[zeroshot]\n"other.z" = "test"\n')


def test_scores_of_a_group_are_those_of_its_units(screen: Context, tmp_path: Path) -> None:
    path = tmp_path / "split.toml"
    held = hold_out(screen, path, TOML)
    result = Perturbation(held.config).run(screen)
    rows = {row.method.name: row for row in result.rows}
    assert {"Pearson, few-shot", "Pearson, zero-shot"} <= {*rows["mean"].scores}
    profiles = held.profiles
    n_units = len(held.unit_names)
    measured = profiles.measure_changes(
        held.unit_of_cell, n_units, profiles.average_controls(REFERENCE_HALF)
    )
    train = np.flatnonzero(held.split_of_unit == "train")
    mean = ChangePredictor(held).changes_from_start[train].mean(0)
    for group, names in groups_of(held).items():
        units = [held.unit_names.index(name) for name in names]
        no_genes = np.zeros((len(units), measured.shape[1]), bool)
        predicted = np.tile(mean, (len(units), 1))
        scores = score_changes(predicted, measured[units], no_genes, 5)
        for metric, values in scores.items():
            [found] = rows["mean"].scores[f"{metric}, {group}"].repetitions
            assert found == pytest.approx(values.mean()), (metric, group)
    changes = dict(zip(held.unit_names, ChangePredictor(held).changes_from_start))
    [fold] = divide_by_novelty(held)["few-shot"]
    predicted_of = {
        method.name: values
        for method, values in next(ChangePredictor(held).predict([fold])).items()
    }
    in_context = [
        values
        for name, values in changes.items()
        if splits_of(held)[name] == "train" and name.endswith("y")
    ]
    np.testing.assert_allclose(predicted_of["mean of the context"][1], np.mean(in_context, axis=0))
    np.testing.assert_allclose(predicted_of["same perturbation + mean"][1], changes["C | x"])
    sums = changes["A | y"] + changes["B | x"]  # B of y was validated on
    np.testing.assert_allclose(predicted_of["additive"][0], sums)


def test_only_training_units_are_fitted_on(screen: Context, tmp_path: Path) -> None:
    held = hold_out(screen, tmp_path / "split.json", json.dumps(LISTS))
    folds = [fold for [fold] in divide_by_novelty(held).values()]
    changed = held.profiles.expression.tolil()
    is_fitted = np.isin(held.unit_of_cell, np.flatnonzero(held.split_of_unit == "train"))
    changed[np.flatnonzero(~is_fitted & (held.profiles.half != 0))] = 7.0
    other = replace(held, profiles=replace(held.profiles, expression=changed.tocsr()))
    pairs = zip(
        ChangePredictor(held).predict(folds), ChangePredictor(other).predict(folds), strict=True
    )
    for predicted, again in pairs:
        for method, values in predicted.items():
            np.testing.assert_array_equal(values, again[method], err_msg=method.name)


def test_units_that_the_model_saw_are_left_out(screen: Context, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text(json.dumps(LISTS))
    scored = ~screen.roles["perturbation"].isin(["D", "A"]).to_numpy()
    result = Perturbation(config_of(path)).run(replace(screen, scored=scored))
    assert result.notes[0] == (
        f"1 of 3 units that {path} tests are not tested, the first D, because the model saw cells of them; hold them "
        "out of its corpus (shard.split_by)."
    )
    assert "tested_new_perturbation" not in result.figures
    assert result.figures["split_unnamed"] == "none"
    with pytest.raises(Skipped, match=r"shard\.split_by"):
        Perturbation(config_of(path)).run(replace(screen, scored=np.zeros_like(scored)))


def test_one_training_unit_is_enough(screen: Context, tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text("perturbation,context,split\nA,x,train\nA,y,test\n,z,val\n")
    result = Perturbation(config_of(path)).run(screen)
    json.dumps(result.to_json(), allow_nan=False)
    assert result.figures["split_unnamed"] == "A+B, A+C, B, C, C+D, D"
    errors = [row.value("MAE, zero-shot") for row in result.rows if row.method.name != "no change"]
    assert all(error is not None and np.isfinite(error) for error in errors)


def additive_changes(interaction: float) -> tuple[np.ndarray, list[tuple[str, ...]], np.ndarray]:
    """Changes, (U, G), of pairs of three perturbations in two contexts, which add up but for an
    interaction; with parts and contexts.
    """
    generator = np.random.default_rng(0)
    parts = [("A",), ("B",), ("C",), ("A", "B"), ("B", "C"), ("D", "E")]
    changes = []
    for _ in range(2):
        alone = {name: generator.normal(size=30) for name in "ABCDE"}
        for unit_parts in parts:
            change = np.sum([alone[part] for part in unit_parts], axis=0)
            changes.append(change + interaction * (len(unit_parts) > 1))
    return np.array(changes), parts * 2, np.repeat(["x", "y"], len(parts))


def test_the_additive_baseline_is_exact_for_sums() -> None:
    for interaction in (0.0, 0.3):
        changes, parts, place = additive_changes(interaction)
        names = np.array(["+".join(unit_parts) for unit_parts in parts])
        train = np.flatnonzero([len(unit_parts) == 1 for unit_parts in parts])
        test = np.flatnonzero([len(unit_parts) == 2 for unit_parts in parts])
        no_dose = np.full(len(parts), "")
        predicted = sum_changes_of_parts(changes, train, test, names, no_dose, place, parts)
        expected = changes[test] - interaction
        expected[[2, 5]] = np.nan  # of D and E nothing is known
        np.testing.assert_allclose(predicted, expected)
    # a part that its context lacks is that of the others
    without = train[1:]
    predicted = sum_changes_of_parts(changes, without, test, names, no_dose, place, parts)
    np.testing.assert_allclose(predicted[0], changes[6] + changes[1])


def test_the_file_of_changes_has_units_of_contexts(screen: Context, tmp_path: Path) -> None:
    path = tmp_path / "split.toml"
    path.write_text(TOML)
    made = write_changes(tmp_path / "changes.h5ad", screen, config_of(path), "digest")
    about: Mapping[str, Any] = made.uns["cellmill_changes"]
    tested = [f"{name} | z" for name in NAMES[:-1]] + ["A+B | y", "C | y"]
    assert sorted(about["perturbations"]) == sorted(tested)
    assert np.isfinite(about["changes"]).all()
    assert {*made.obs["perturbation"]} == {*tested, "control"}
