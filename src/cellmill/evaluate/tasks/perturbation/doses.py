"""Dose curves: changes at held-out doses, which lie between or beyond the doses of fitted units.

For each compound, with dose d and gene g:

    linear   c_g(d) = a_g + b_g log10(d)
    Hill     c_g(d) = a_g h(d), h(d) = d^n / (EC50^n + d^n)

EC50 and n are shared by the genes of a compound. They are fitted to the strength of the changes:
their projection on the first right singular vector. `a_g` and `b_g` are least squares. A compound
whose Hill curve cannot be fitted has the linear prediction, and the table says why. A compound
without fitted doses has the mean of all.

Legend: U units, G genes, D doses of a compound.
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
# in micromolar, and in micrograms per millilitre
MOLAR_UNITS = {"pM": 1e-6, "nM": 1e-3, "uM": 1.0, "mM": 1e3, "M": 1e6}
MASS_UNITS = {"ng/ml": 1e-3, "ug/ml": 1.0, "mg/ml": 1e3}
# `-` is often part of a name, so a number without a unit is a dose only after `_`
NAME_WITH_DOSE = re.compile(
    r"(?P<compound>.+?)(?P<between>[_ @-])(?P<number>\d+\.?\d*(?:e[-+]?\d+)?) ?(?P<unit>[a-zA-Zµμ]+(?:/m[lL])?)?"
)
# bounds of a Hill curve: EC50 in decades beyond the doses, and its coefficient n
EC50_MARGIN = 1.0
SLOPES = (0.3, 5.0)
MAX_TOP = 100.0  # largest strength of a curve, relative to the largest one at its doses
LARGEST_LOG = 30.0  # largest log10 of an end of an interval
FEWEST_DOSES = 4  # doses that a compound needs to lose one after the other


class Curve(NamedTuple):
    """Hill curve of a compound; `reason` says why there is none."""

    log_ec50: float = np.nan
    low: float = np.nan  # 95 % interval; NaN for a curve through three doses
    high: float = np.nan
    slope: float = np.nan
    reason: str = ""


def parse_names(names: np.ndarray, unit: str | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Compound and dose, as text, of each name such as `drug_0.1uM`; and the unit of all doses, uM or
    ug/ml.

    `unit` is the unit of names without one. A name without a dose has an empty dose. Raises DataError
    if no name has a dose, for a number without a unit, and for units that cannot be compared.
    """
    parsed: dict[str, tuple[str, str]] = {}
    example_of_unit: dict[str, str] = {}  # a name with a dose in each common unit
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
        example_of_unit.setdefault("uM" if dose_unit in MOLAR_UNITS else "ug/ml", name)
        parsed[name] = (match["compound"], f"{float(match['number']) * factor:.6g}")
    if len(example_of_unit) != 1:
        shown = " and ".join(example_of_unit.values()) or ", ".join([*parsed][:3])
        raise DataError(
            f"expected perturbations with doses of one kind, such as 'drug_0.1uM', got {shown}; set doses of task "
            "perturbation to column or null"
        )
    compounds = np.array([parsed[name][0] for name in names.tolist()])
    doses = np.array([parsed[name][1] for name in names.tolist()])
    return compounds, doses, next(iter(example_of_unit))


def log_doses(doses: np.ndarray) -> np.ndarray:
    """(n,) float64: log10 of doses, which are text; NaN without one above 0."""
    doses = np.array([float(dose or "nan") for dose in doses.tolist()])
    return np.log10(doses, out=np.full(len(doses), np.nan), where=doses > 0)


def leave_out_doses(compound: np.ndarray, log_dose: np.ndarray) -> list[np.ndarray]:
    """Test units of each fold: the lowest dose of every compound with enough doses, then the next."""
    units = np.arange(len(compound))
    by_compound = [units[compound == name] for name in np.unique(compound)]
    ordered = [
        same[np.argsort(log_dose[same])] for same in by_compound if len(same) >= FEWEST_DOSES
    ]
    n_folds = max(map(len, ordered), default=0)
    return [
        np.sort([same[number] for same in ordered if number < len(same)])
        for number in range(n_folds)
    ]


def hill(log_dose: np.ndarray, top: float, log_ec50: float, slope: float) -> np.ndarray:
    """(D,): strength at each of `log_dose`, (D,) log10 of doses."""
    return np.asarray(top / (1 + 10 ** (slope * (log_ec50 - log_dose))))


def fit_hill(log_dose: np.ndarray, changes: np.ndarray) -> Curve:
    """Curve of `changes`, (D, G), at doses in any order, `log_dose` (D,) in log10."""
    if len(np.unique(log_dose)) < FEWEST_DOSES - 1:
        return Curve(reason=f"{len(np.unique(log_dose))} doses")
    # the direction of the changes, such that they grow along it
    direction = np.linalg.svd(changes, full_matrices=False)[2][0]
    strength = changes @ direction
    strength = strength * np.sign(strength.sum())
    low = log_dose.min() - EC50_MARGIN
    high = log_dose.max() + EC50_MARGIN
    top = np.abs(strength).max()
    if not top > 0:
        return Curve(reason="no change")
    start = (top, float(np.median(log_dose)), 1.0)
    bounds = ((0, low, SLOPES[0]), (MAX_TOP * top, high, SLOPES[1]))
    try:
        with warnings.catch_warnings():
            # three doses determine the three parameters and leave no residual for a covariance
            warnings.simplefilter("ignore", OptimizeWarning)
            parameters, covariance = curve_fit(hill, log_dose, strength, start, bounds=bounds)
    except RuntimeError:
        return Curve(reason="the fit did not converge")
    _, log_ec50, slope = parameters.tolist()
    if not low + 0.01 < log_ec50 < high - 0.01:
        return Curve(reason="EC50 beyond the doses")
    if not np.isfinite(covariance[1, 1]):
        return Curve(log_ec50, slope=slope)
    freedom = len(log_dose) - 3
    half_width = float(stdtrit(freedom, 0.975) * covariance[1, 1] ** 0.5)
    return Curve(log_ec50, log_ec50 - half_width, log_ec50 + half_width, slope)


def predict_new_doses(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    compound: np.ndarray,
    log_dose: np.ndarray,
) -> ChangesByMethod:
    """Predict changes, (test units, G), at doses that no fitted unit of the compound has.

    `changes` are (U, G), `compound` and `log_dose` (U,). A compound without fitted units has the
    mean of all.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    predicted = {method: mean.copy() for method in (SAME_MEAN, SAME_NEAREST, LINEAR, HILL)}
    for row, unit in enumerate(tested):
        same = fitted[compound[fitted] == compound[unit]]
        if not len(same):
            continue
        fitted_changes = changes[same]
        distances = np.abs(log_dose[same] - log_dose[unit])
        predicted[SAME_MEAN][row] = fitted_changes.mean(0)
        predicted[SAME_NEAREST][row] = fitted_changes[distances.argmin()]
        linear = fitted_changes.mean(0)
        if len(np.unique(log_dose[same])) > 1:
            slope, intercept = np.polyfit(log_dose[same], fitted_changes, 1)
            linear = intercept + slope * log_dose[unit]
        predicted[LINEAR][row] = linear
        curve = fit_hill(log_dose[same], fitted_changes)
        predicted[HILL][row] = linear
        if not curve.reason:
            strength = hill(log_dose[same], 1, curve.log_ec50, curve.slope)
            amplitude = strength @ fitted_changes / (strength @ strength)
            at_dose = hill(log_dose[[unit]], 1, curve.log_ec50, curve.slope)
            predicted[HILL][row] = amplitude * at_dose
    return {NO_CHANGE: no_change, MEAN: mean} | predicted


def describe_linear_doses(
    changes: np.ndarray, folds: list[Fold], compound: np.ndarray, log_dose: np.ndarray
) -> list[str]:
    """A sentence with the number of held-out doses that row HILL predicts by the linear fit, and why;
    none if there are no such doses.
    """
    reasons: Counter[str] = Counter()
    n_tested = 0
    for fold in folds:
        n_tested += len(fold.tested)
        for unit in fold.tested:
            same = fold.fitted[compound[fold.fitted] == compound[unit]]
            if not len(same):
                continue  # it has the mean of all
            reasons[fit_hill(log_dose[same], changes[same]).reason] += 1
    del reasons[""]
    if not reasons:
        return []
    shown = "; ".join(f"{n:,}: {reason}" for reason, n in reasons.items())
    return [
        f"{HILL.name}: {reasons.total():,} of {n_tested:,} held-out doses have the linear prediction ({shown})."
    ]


def tabulate_curves(
    changes: np.ndarray, compound: np.ndarray, log_dose: np.ndarray, unit: str, errors: ByMethod
) -> list[dict[str, Any]]:
    """Row of each compound: its curve over all doses, with the interval of EC50 (None for three
    doses), and mean absolute errors at held-out doses.

    `errors` are (repetitions, compounds) by method, compounds in order.
    """
    rows = []
    for number, name in enumerate(np.unique(compound)):
        same = compound == name
        curve = fit_hill(log_dose[same], changes[same])
        row: dict[str, Any] = {"compound": str(name), "doses": len(np.unique(log_dose[same]))}
        logs = {f"EC50{unit}": curve.log_ec50, "low": curve.low, "high": curve.high}
        for key, log in logs.items():
            row[key] = (
                None if np.isnan(log) else float(10 ** np.clip(log, -LARGEST_LOG, LARGEST_LOG))
            )
        row["n"] = None if curve.reason else curve.slope
        row["fit"] = f"linear: {curve.reason}" if curve.reason else "Hill"
        for method, values in errors.items():
            is_tested = np.isfinite(values[:, number])
            error = float(values[is_tested, number].mean()) if is_tested.any() else None
            row[f"MAE, {method.name}"] = error
        rows.append(row)
    return rows
