"""Doses: their names, Hill curves with a known EC50, exact lines, fallbacks, and the task on a simulated screen."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.errors import DataError
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.perturbation.baselines import (
    MEAN,
    SAME_LINEAR,
    SAME_MEAN,
    SAME_NEAREST,
    predict_new_contexts,
    sum_changes_of_parts,
)
from cellmill.evaluate.tasks.perturbation.doses import (
    HILL,
    LINEAR,
    compute_log_doses,
    fit_hill,
    note_linear_fallbacks,
    parse_names,
    predict_new_doses,
    tabulate_curves,
)
from cellmill.evaluate.tasks.perturbation.folds import explain_no_folds, make_folds
from cellmill.evaluate.tasks.perturbation.task import Perturbation
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits

LOG_DOSES = np.linspace(-2, 2, 9)
OPTIONS: dict[str, Any] = {"held_out": ["perturbation"], "min_cells": 4, "top_genes": 5}


def hill_changes(log_ec50: float, slope: float, noise: float, seed: int = 0) -> np.ndarray:
    """(D, 50): changes along a Hill curve, of either sign by gene, at LOG_DOSES."""
    generator = np.random.default_rng(seed)
    dose = 10**LOG_DOSES
    strength = dose**slope / (10 ** (log_ec50 * slope) + dose**slope)
    changes = strength[:, None] * generator.normal(size=50)
    return changes + noise * generator.normal(size=changes.shape)


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("drug_0.1uM", None, ("drug", "0.1", "uM")),
        ("drug_100nM", None, ("drug", "0.1", "uM")),
        ("drug 2 µM", None, ("drug", "2", "uM")),
        ("a-b_1e-3mM", "nM", ("a-b", "1", "uM")),
        ("drug_10", "nM", ("drug", "0.01", "uM")),
        ("IL-2_5uM", "nM", ("IL-2", "5", "uM")),
        ("LPS@5ng/mL", None, ("LPS", "0.005", "ug/ml")),
    ],
)
def test_a_dose_at_the_end_of_a_name_has_a_unit(
    name: str, unit: str | None, expected: tuple[str, str, str]
) -> None:
    compound, dose, common = parse_names(np.array([name, "", "IL-2"]), unit)
    assert (compound[0], dose[0], common) == expected
    assert compound.tolist()[1:] == ["", "IL-2"]
    assert dose.tolist()[1:] == ["", ""]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["drug_10", "drug_1uM"], r"'drug_10' ends in a number without a unit; set dose_unit of"),
        (
            ["a_1uM", "a_1ng/ml"],
            r"doses of one kind, such as 'drug_0.1uM', got a_1ng/ml and a_1uM;",
        ),
        (["TP53", "", "IRF1"], r"got IRF1, TP53; set doses of task perturbation to column or null"),
        (["x_5h"], r"got x_5h; set doses"),
    ],
)
def test_names_without_comparable_doses_are_one_line(names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        parse_names(np.array(names), None)
    assert "\n" not in str(raised.value)


def test_ec50_is_recovered_within_its_interval() -> None:
    assert compute_log_doses(np.array(["100", "0", ""])).tolist()[0] == 2
    assert np.isnan(compute_log_doses(np.array(["0", "", "-1"]))).all()
    for log_ec50, slope in ((-0.7, 1.0), (0.4, 2.5)):
        exact = fit_hill(LOG_DOSES, hill_changes(log_ec50, slope, 0.0))
        assert (exact.log_ec50, exact.coefficient) == pytest.approx((log_ec50, slope), abs=1e-3)
        inside = []
        for seed in range(60):
            curve = fit_hill(LOG_DOSES, hill_changes(log_ec50, slope, 0.2, seed))
            assert not curve.reason
            inside.append(curve.log_ec50_low <= log_ec50 <= curve.log_ec50_high)
        assert 0.85 <= np.mean(inside) <= 1


def test_held_out_doses_of_the_true_curve_are_exact() -> None:
    lines = np.outer(LOG_DOSES, np.arange(1, 51)) + 3
    changes = np.vstack([hill_changes(0.3, 1.5, 0.0), lines])
    compound = np.repeat(["hill", "line"], 9)
    log_dose = np.tile(LOG_DOSES, 2)
    test = np.array([3, 9 + 3])
    train = np.setdiff1d(np.arange(18), test)
    predicted = predict_new_doses(changes, train, test, compound, log_dose)
    np.testing.assert_allclose(predicted[HILL][0], changes[3], atol=1e-3)
    np.testing.assert_allclose(predicted[LINEAR][1], changes[12], atol=1e-9)
    assert np.abs(predicted[LINEAR][0] - changes[3]).mean() > 0.02
    np.testing.assert_array_equal(predicted[SAME_NEAREST][0], changes[2])
    other = changes.copy()
    other[test] = 9.0
    again = predict_new_doses(other, train, test, compound, log_dose)
    for method, values in predicted.items():
        np.testing.assert_array_equal(values, again[method], err_msg=method.name)


def test_three_fitted_doses_determine_the_curve() -> None:
    chosen = [1, 3, 5, 6]  # 0.03 to 10, about an EC50 of 1
    changes = hill_changes(0.0, 1.5, 0.0)[chosen]
    log_dose = LOG_DOSES[chosen]
    units = np.arange(4)
    compound = np.repeat("a", 4)
    for unit in units:
        train = np.delete(units, unit)
        curve = fit_hill(log_dose[train], changes[train])
        assert (curve.log_ec50, curve.coefficient) == pytest.approx((0, 1.5), abs=1e-3)
        assert np.isnan([curve.log_ec50_low, curve.log_ec50_high]).all()
        predicted = predict_new_doses(changes, train, units[[unit]], compound, log_dose)
        np.testing.assert_allclose(predicted[HILL][0], changes[unit], atol=2e-3)
        folds = [Fold(0, train, units[[unit]])]
        assert note_linear_fallbacks(changes, folds, compound, log_dose) == []
    [row] = tabulate_curves(changes[:3], compound[:3], log_dose[:3], "", {})
    assert (row["fit"], row["low"], row["high"]) == ("Hill", None, None)
    assert row["EC50"] == pytest.approx(1, rel=1e-2)


def test_a_compound_without_training_doses_is_not_called_linear() -> None:
    changes = np.outer(np.arange(6.0), np.ones(3))
    compound = np.array(["a", "a", "a", "b", "b", "b"])
    log_dose = np.tile([0.0, 1.0, 2.0], 2)
    train = np.arange(3)
    test = np.arange(3, 6)
    predicted = predict_new_doses(changes, train, test, compound, log_dose)
    np.testing.assert_array_equal(predicted[LINEAR], predicted[MEAN])
    folds = [Fold(0, train, test)]
    assert note_linear_fallbacks(changes, folds, compound, log_dose) == []
    few = [Fold(0, train[:2], np.arange(2, 6))]
    assert note_linear_fallbacks(changes, few, compound, log_dose) == [
        "Hill curve: 1 of 4 held-out doses have the linear prediction (1: 2 doses)."
    ]
    single = [Fold(0, train[:1], np.arange(1, 6))]
    assert note_linear_fallbacks(changes, single, compound, log_dose) == [
        "Hill curve: 2 of 5 held-out doses have the linear prediction (2: 1 dose)."
    ]


def test_a_failed_curve_is_linear_and_says_why() -> None:
    line = np.outer(LOG_DOSES + 2.5, np.ones(50))
    faults = {
        "2 doses": (LOG_DOSES[:2], line[:2]),
        "no change": (LOG_DOSES, 0 * line),
        "EC50 beyond the doses": (LOG_DOSES, 10 ** np.outer(LOG_DOSES, np.ones(50))),
    }
    for reason, (log_dose, changes) in faults.items():
        assert fit_hill(log_dose, changes).reason == reason
        units = np.arange(len(log_dose))
        names = np.repeat("a", len(units))
        predicted = predict_new_doses(changes, units[1:], units[:1], names, log_dose)
        np.testing.assert_array_equal(predicted[HILL], predicted[LINEAR])


@pytest.fixture(scope="module")
def screen(context: Context) -> Context:
    """Two compounds of four doses, one of two, and controls."""
    names = [f"{name}_{dose}nM" for name in "ab" for dose in (10, 100, 1000, 10000)]
    names += ["c_1uM", "c_10uM", "control", "control"]
    perturbation = pd.Series(np.array(names)[np.arange(context.reader.n_obs) % 12])
    roles = {"perturbation": perturbation, "is_control": perturbation == "control"}
    return replace(context, roles=roles, scored=np.ones(len(perturbation), bool))


def test_a_dose_is_held_out_of_each_compound(screen: Context) -> None:
    config = PerturbationConfig(doses="names", **OPTIONS)
    held = PerturbedUnits.read(screen, config, "dose")
    folds = [*make_folds(held)]
    tested = [[held.unit_names[unit] for unit in fold.tested] for fold in folds]
    assert tested == [[f"a | {dose}", f"b | {dose}"] for dose in ("0.01", "0.1", "1", "10")]
    for fold in folds:
        assert sorted([*fold.fitted, *fold.tested]) == [*range(10)]
    result = Perturbation(config).run(screen)
    json.dumps(result.to_json(), allow_nan=False)
    rows = {row.method.name: row for row in result.rows}
    column = "MAE, new dose"
    curves = result.tables["dose curves"]
    assert [(row["compound"], row["doses"]) for row in curves] == [("a", 4), ("b", 4), ("c", 2)]
    assert "EC50 (uM)" in curves[0]
    assert curves[2]["fit"] == "linear: 2 doses"
    assert curves[2]["MAE, Hill curve"] is None
    errors = [row["MAE, linear in log dose"] for row in curves[:2]]
    assert rows["linear in log dose"].value(column) == pytest.approx(np.mean(errors))
    # whole compounds are held out together
    whole = PerturbedUnits.read(screen, config, "perturbation")
    assert np.unique(whole.group_of_unit).tolist() == ["a", "b", "c"]
    for fold in make_folds(whole):
        assert not {*whole.perturbation[fold.tested]} & {*whole.perturbation[fold.fitted]}


def test_compounds_of_too_few_doses_are_named_as_the_reason(screen: Context) -> None:
    fewer = {f"{name}_10000nM": f"{name}_1000nM" for name in "ab"}
    perturbation = screen.roles["perturbation"].replace(fewer)
    other = replace(screen, roles={**screen.roles, "perturbation": perturbation})
    config = PerturbationConfig(doses="names", **OPTIONS)
    held = PerturbedUnits.read(other, config, "dose")
    assert [*make_folds(held)] == []
    assert explain_no_folds(held) == (
        f"held out dose: no compound has 4 doses of {config.min_cells} cells or more (min_cells)"
    )


def test_a_column_of_doses_is_the_same_as_names(screen: Context) -> None:
    config = PerturbationConfig(doses="names", **OPTIONS)
    names = screen.roles["perturbation"]
    compound, dose, _ = parse_names(names.to_numpy(str), None)
    numbers = pd.Series(np.where(dose == "", "nan", dose)).astype(float)
    roles = {**screen.roles, "perturbation": pd.Series(compound), "dose": numbers}
    other = PerturbationConfig(doses="column", dose_unit="uM", **OPTIONS)
    by_column = Perturbation(other).run(replace(screen, roles=roles))
    by_name = Perturbation(config).run(screen)
    assert by_column.tables == by_name.tables
    assert by_column.notes == by_name.notes


def test_perturbations_without_a_dose_are_named(screen: Context) -> None:
    perturbation = screen.roles["perturbation"].replace({"c_1uM": "TP53", "c_10uM": "c_10um"})
    other = replace(screen, roles={**screen.roles, "perturbation": perturbation})
    result = Perturbation(PerturbationConfig(doses="names", **OPTIONS)).run(other)
    assert result.figures["dose_left_out"] == "TP53, c_10um"
    column = Perturbation(PerturbationConfig(doses="column", **OPTIONS)).run(screen)
    assert "new dose" not in str(column.rows)
    assert column.figures["dose_folds"] == 0


def test_doses_next_to_a_split_file_are_refused() -> None:
    with pytest.raises(ValidationError, match="doses: expected null next to split_file"):
        PerturbationConfig(doses="names", split_file="s.csv")
    with pytest.raises(ValidationError, match="dose_unit: expected doses next to uM"):
        PerturbationConfig(dose_unit="uM")


def dosed_units(n_genes: int) -> pd.DataFrame:
    """Perturbations a and b and their combination at doses 1 and 9 in three donors, with changes of
    `n_genes` genes that grow with the dose.
    """
    generator = np.random.default_rng(0)
    units = []
    for donor in "xyz":
        for name in ("a", "b", "a+b"):
            for dose in ("1", "9"):
                change = float(dose) * generator.normal(1, 0.1, n_genes)
                units.append((name, dose, donor, change))
    return pd.DataFrame(units, columns=["name", "dose", "donor", "change"])


def test_new_contexts_are_predicted_at_the_same_dose() -> None:
    units = dosed_units(20)
    changes = np.stack(units["change"])
    controls = np.zeros_like(changes)
    controls[units["donor"] == "y"] = 1.0  # x is nearest to z
    not_fitted = (units["donor"] == "z") | (units["name"] + units["dose"] == "b9")
    fitted = np.flatnonzero(~not_fitted)
    tested = np.flatnonzero(units["donor"] == "z")
    names = units["name"].to_numpy(str)
    doses = units["dose"].to_numpy(str)
    predicted = predict_new_contexts(changes, fitted, tested, names, doses, controls)
    linear = {}
    for row, unit in enumerate(units.iloc[tested].itertuples()):
        same = [
            other
            for other in units.iloc[fitted].itertuples()
            if other.name == unit.name and (other.dose == unit.dose or unit.name == "b")
        ]
        expected = np.mean([other.change for other in same], axis=0)
        np.testing.assert_allclose(predicted[SAME_MEAN][row], expected)
        in_x = [other.change for other in same if other.donor == "x"]
        np.testing.assert_array_equal(predicted[SAME_NEAREST][row], in_x[0])
        linear[unit.name + unit.dose] = predicted[SAME_LINEAR][row].mean()
    assert linear["a9"] > 2 * linear["a1"]
    # dose 9 of b was not fitted
    assert linear["b9"] == linear["b1"]
    assert linear["a+b9"] > 2 * linear["a+b1"]


def test_parts_of_a_combination_are_added_at_its_dose() -> None:
    units = dosed_units(20)
    changes = np.stack(units["change"])
    is_single = units["name"] != "a+b"
    is_b = units["name"] == "b"
    is_fitted = is_single & ~(is_b & ((units["dose"] == "1") | (units["donor"] == "z")))
    columns = (units[column].to_numpy(str) for column in ("name", "dose", "donor"))
    predicted = sum_changes_of_parts(
        changes,
        np.flatnonzero(is_fitted),
        np.flatnonzero(~is_single),
        *columns,
        parts=[name.split("+") for name in units["name"]],
    )
    for row, unit in enumerate(units[~is_single].itertuples()):
        same_donor = units["donor"] == unit.donor
        a = units[(units["name"] == "a") & (units["dose"] == unit.dose) & same_donor]
        # b was fitted at dose 9 in x and y only
        b = units[is_b & is_fitted & (same_donor | (unit.donor == "z"))]
        expected = a["change"].iloc[0] + np.mean(b["change"].tolist(), axis=0)
        np.testing.assert_allclose(predicted[row], expected)
