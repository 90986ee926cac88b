"""Dose curves: predicted changes at held-out doses, between or beyond the doses of the fitted units.

The change of gene g under a compound depends on the dose d. It is predicted by two curves:

    linear   c_g(d) = a_g + b_g log10(d)
    Hill     c_g(d) = a_g h(d), h(d) = d^n / (EC50^n + d^n)

Each gene has its own `a_g` and `b_g`, which are fitted by least squares. EC50 and the Hill coefficient
n are common to all genes of a compound. EC50 and n are fitted to the strength of the compound's
changes, which is the projection of the changes on their first right singular vector.

If a compound has no Hill curve, the linear prediction is used instead, and the table says why. If a
compound has no fitted dose, the prediction is the mean change of all fitted units.

Legend: U units (see `profiles.py`), G genes, D doses of one compound.
"""

import re
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit
from scipy.special import stdtrit

from cellmill.errors import DataError
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.perturbation.baselines import (
    MEAN,
    NO_CHANGE,
    SAME_MEAN,
    SAME_NEAREST,
    ChangesByMethod,
)
from cellmill.runs.results import ScoredMethod

LINEAR = ScoredMethod("linear in log dose")
HILL = ScoredMethod("Hill curve")

# factors that convert a dose to micromolar (uM), or to micrograms per millilitre (ug/ml)
MOLAR_UNITS = {"pM": 1e-6, "nM": 1e-3, "uM": 1.0, "mM": 1e3, "M": 1e6}
MASS_UNITS = {"ng/ml": 1e-3, "ug/ml": 1.0, "mg/ml": 1e3}
# A name with a dose, such as drug_0.1uM. The character `-` is often part of a name, so a number
# without a unit counts as a dose only after `_`.
NAME_WITH_DOSE = re.compile(
    r"(?P<compound>.+?)(?P<between>[_ @-])(?P<number>\d+\.?\d*(?:e[-+]?\d+)?) ?(?P<unit>[a-zA-Zµμ]+(?:/m[lL])?)?"
)

MIN_DOSES = 4  # fewest doses of a compound whose doses are held out in turn
# bounds of the fit of a Hill curve
EC50_MARGIN = 1.0  # EC50 lies at most this many decades below or above the doses of the compound
HILL_COEFFICIENTS = (0.3, 5.0)  # lowest and highest coefficient n
MAX_TOP = 100.0  # highest strength of the curve, relative to the highest strength at its doses
AT_BOUND = 0.01  # a fitted EC50 that is closer to a bound, in decades, counts as at the bound
# EC50 and the ends of its interval are clipped to 10^-30 and 10^30, so that they are finite
MAX_LOG_EC50 = 30.0


class ParsedNames(NamedTuple):
    """Compounds and doses that perturbations are named after, such as drug and 0.1 of `drug_0.1uM`."""

    compounds: np.ndarray  # (names,) text; the whole name if it has no dose
    doses: np.ndarray  # (names,) text: number in the common unit; empty for a name without a dose
    unit: str  # common unit of all doses: uM or ug/ml


class Curve(NamedTuple):
    """Hill curve of a compound. If the fit gave none, `reason` says why, and the numbers are NaN."""

    log_ec50: float = np.nan
    # 95 % interval of `log_ec50`; NaN for a curve through three doses
    log_ec50_low: float = np.nan
    log_ec50_high: float = np.nan
    coefficient: float = np.nan  # the Hill coefficient n
    reason: str = ""


def parse_names(names: np.ndarray, unit: str | None) -> ParsedNames:
    """Divide each name, such as `drug_0.1uM`, into a compound and a dose, and convert all doses to one
    unit.

    `unit` is the unit of doses that are written without a unit. A name with an unknown unit, such as
    `drug_5h`, counts as a name without a dose. Raises DataError if no name has a dose, if a dose has no
    unit and `unit` is None, and if some doses are molar and other doses are masses.
    """
    parsed: dict[str, tuple[str, str]] = {}
    # at most two names: one with a molar dose, by uM, and one with a mass, by ug/ml
    example_by_unit: dict[str, str] = {}
    for name in np.unique(names).tolist():
        parsed[name] = (name, "")
        match = NAME_WITH_DOSE.fullmatch(name)
        if match is None:
            continue
        default = unit if match["between"] == "_" else None
        dose_unit = match["unit"] or default or ""
        dose_unit = dose_unit.replace("µ", "u").replace("μ", "u").replace("mL", "ml")
        factor = MOLAR_UNITS.get(dose_unit, MASS_UNITS.get(dose_unit))
        if factor is None:
            if match["unit"] is None and match["between"] == "_":
                raise DataError(
                    f"perturbation {name!r} ends in a number without a unit; set dose_unit of task perturbation"
                )
            continue
        example_by_unit.setdefault("uM" if dose_unit in MOLAR_UNITS else "ug/ml", name)
        parsed[name] = (match["compound"], f"{float(match['number']) * factor:.6g}")
    if len(example_by_unit) != 1:
        without_dose = [name for name in parsed if name]  # controls have an empty name
        shown = " and ".join(example_by_unit.values()) or ", ".join(without_dose[:3])
        raise DataError(
            f"expected perturbations with doses of one kind, such as 'drug_0.1uM', got {shown}; set doses of task "
            "perturbation to column or null"
        )
    compounds = np.array([parsed[name][0] for name in names.tolist()])
    doses = np.array([parsed[name][1] for name in names.tolist()])
    return ParsedNames(compounds, doses, next(iter(example_by_unit)))


def compute_log_doses(doses: np.ndarray) -> np.ndarray:
    """(n,) float64: log10 of `doses`, (n,) text. NaN for an empty dose, and for a dose of 0 or less."""
    numbers = np.array([float(dose or "nan") for dose in doses.tolist()])
    return np.log10(numbers, out=np.full(len(numbers), np.nan), where=numbers > 0)


def leave_out_doses(compound: np.ndarray, log_dose: np.ndarray) -> list[np.ndarray]:
    """Units (indices) that each fold tests: first the lowest dose of each compound, then the second
    lowest dose of each compound, and so on.

    `compound` and `log_dose`, both (U,), describe the units. Compounds with fewer than MIN_DOSES
    doses are not tested.
    """
    units = np.arange(len(compound))
    by_compound = [units[compound == name] for name in np.unique(compound)]
    # units of each compound with enough doses, by rising dose
    ordered = [same[np.argsort(log_dose[same])] for same in by_compound if len(same) >= MIN_DOSES]
    n_folds = max(map(len, ordered), default=0)
    return [
        np.sort([same[number] for same in ordered if number < len(same)])
        for number in range(n_folds)
    ]


def compute_hill_strength(
    log_dose: np.ndarray, top: float, log_ec50: float, coefficient: float
) -> np.ndarray:
    """(D,): strength of a Hill curve at each of `log_dose`, (D,) log10 of doses. The strength rises
    from 0 to `top`.
    """
    return np.asarray(top / (1 + 10 ** (coefficient * (log_ec50 - log_dose))))


def fit_hill(log_dose: np.ndarray, changes: np.ndarray) -> Curve:
    """Hill curve of one compound, fitted to the strength of its changes at all doses.

    `log_dose` is (D,) log10 of the doses, in any order, and `changes` are (D, G).
    """
    n_doses = len(np.unique(log_dose))
    if n_doses < MIN_DOSES - 1:  # MIN_DOSES less the dose that is held out
        return Curve(reason="1 dose" if n_doses == 1 else f"{n_doses} doses")
    # strength (D,): projection of the changes on their first right singular vector, which is their
    # main direction. Its sign is chosen so that the sum of the strengths is positive.
    direction = np.linalg.svd(changes, full_matrices=False)[2][0]
    strength = changes @ direction
    strength = strength * np.sign(strength.sum())
    max_strength = np.abs(strength).max()
    if not max_strength > 0:
        return Curve(reason="no change")

    # fit (top, log EC50, coefficient) within bounds
    min_log_ec50 = log_dose.min() - EC50_MARGIN
    max_log_ec50 = log_dose.max() + EC50_MARGIN
    min_coefficient, max_coefficient = HILL_COEFFICIENTS
    start = (max_strength, float(np.median(log_dose)), 1.0)
    lowest = (0, min_log_ec50, min_coefficient)
    highest = (MAX_TOP * max_strength, max_log_ec50, max_coefficient)
    try:
        with warnings.catch_warnings():
            # three doses determine the three parameters, and leave no residual for a covariance
            warnings.simplefilter("ignore", OptimizeWarning)
            parameters, covariance = curve_fit(
                compute_hill_strength, log_dose, strength, start, bounds=(lowest, highest)
            )
    except RuntimeError:
        return Curve(reason="the fit did not converge")
    _, log_ec50, coefficient = parameters.tolist()
    if not min_log_ec50 + AT_BOUND < log_ec50 < max_log_ec50 - AT_BOUND:
        return Curve(reason="EC50 beyond the doses")

    # 95 % interval of log EC50, by Student's t distribution
    variance = covariance[1, 1]
    if not np.isfinite(variance):
        return Curve(log_ec50, coefficient=coefficient)
    degrees_of_freedom = len(log_dose) - len(parameters)
    half_width = float(stdtrit(degrees_of_freedom, 0.975) * variance**0.5)
    return Curve(log_ec50, log_ec50 - half_width, log_ec50 + half_width, coefficient)


def predict_new_doses(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    compound: np.ndarray,
    log_dose: np.ndarray,
) -> ChangesByMethod:
    """Predict the changes of the `tested` units, (tested units, G) by method, at doses that no fitted
    unit of the compound has.

    `changes`, (U, G), `compound` and `log_dose`, both (U,), describe all units. `fitted` and `tested`
    are indices of units. If a compound has no fitted unit, the prediction is the mean change of all
    fitted units.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    predicted = {method: mean.copy() for method in (SAME_MEAN, SAME_NEAREST, LINEAR, HILL)}
    for row, unit in enumerate(tested):
        same = fitted[compound[fitted] == compound[unit]]  # fitted units of the same compound
        if not len(same):
            continue
        fitted_changes = changes[same]
        distances = np.abs(log_dose[same] - log_dose[unit])
        predicted[SAME_MEAN][row] = fitted_changes.mean(0)
        predicted[SAME_NEAREST][row] = fitted_changes[distances.argmin()]

        # a straight line for each gene; the mean if there is only one dose
        linear = fitted_changes.mean(0)
        if len(np.unique(log_dose[same])) > 1:
            slope, intercept = np.polyfit(log_dose[same], fitted_changes, 1)
            linear = intercept + slope * log_dose[unit]
        predicted[LINEAR][row] = linear

        # the curve of the compound, times a factor for each gene; without a curve, the line
        curve = fit_hill(log_dose[same], fitted_changes)
        predicted[HILL][row] = linear
        if not curve.reason:
            shape = (1, curve.log_ec50, curve.coefficient)
            strength = compute_hill_strength(log_dose[same], *shape)
            factors = strength @ fitted_changes / (strength @ strength)
            predicted[HILL][row] = factors * compute_hill_strength(log_dose[[unit]], *shape)
    return {NO_CHANGE: no_change, MEAN: mean} | predicted


def note_linear_fallbacks(
    changes: np.ndarray, folds: list[Fold], compound: np.ndarray, log_dose: np.ndarray
) -> list[str]:
    """A note that says how many held-out doses row HILL predicts by the line, and why. The list is empty
    if there are no such doses.

    Doses of a compound without a fitted unit are not counted. `changes`, (U, G), `compound` and
    `log_dose`, both (U,), describe all units.
    """
    n_by_reason: Counter[str] = Counter()
    n_tested = 0
    for fold in folds:
        n_tested += len(fold.tested)
        for unit in fold.tested:
            same = fold.fitted[compound[fold.fitted] == compound[unit]]
            if len(same):
                n_by_reason[fit_hill(log_dose[same], changes[same]).reason] += 1
    del n_by_reason[""]  # doses that a Hill curve predicts
    if not n_by_reason:
        return []
    shown = "; ".join(f"{n:,}: {reason}" for reason, n in n_by_reason.items())
    return [
        f"{HILL.name}: {n_by_reason.total():,} of {n_tested:,} held-out doses have the linear prediction ({shown})."
    ]


def tabulate_curves(
    changes: np.ndarray, compound: np.ndarray, log_dose: np.ndarray, unit: str, errors: ByMethod
) -> list[dict[str, Any]]:
    """A table row for each compound, by name: the Hill curve over all doses, and mean absolute errors
    at held-out doses.

    `changes`, (U, G), `compound` and `log_dose`, both (U,), describe all units. `unit` follows EC50 in
    the heading, such as ` (uM)`. `errors` are (repetitions, compounds) by method, with compounds in the
    order of their names. Numbers that do not exist are None, such as the interval of a curve through
    three doses.
    """
    rows = []
    for number, name in enumerate(np.unique(compound)):
        same = compound == name
        curve = fit_hill(log_dose[same], changes[same])
        row: dict[str, Any] = {"compound": str(name), "doses": len(np.unique(log_dose[same]))}
        log_by_heading = {
            f"EC50{unit}": curve.log_ec50,
            "low": curve.log_ec50_low,
            "high": curve.log_ec50_high,
        }
        for heading, log in log_by_heading.items():
            value = float(10 ** np.clip(log, -MAX_LOG_EC50, MAX_LOG_EC50))
            row[heading] = None if np.isnan(value) else value
        row["n"] = None if curve.reason else curve.coefficient
        row["fit"] = f"linear: {curve.reason}" if curve.reason else "Hill"
        for method, values in errors.items():
            is_tested = np.isfinite(values[:, number])
            error = float(values[is_tested, number].mean()) if is_tested.any() else None
            row[f"MAE, {method.name}"] = error
        rows.append(row)
    return rows
