"""Power law of the validation loss over sizes, y = floor + factor * x ** -exponent.

It is fitted to losses of runs of several sizes as in Hoffmann et al. 2022 (Training compute-optimal
large language models, section 3.3): the Huber loss of log residuals, minimised by L-BFGS from a
grid of starts. The exponent's interval is bootstrapped over runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product

import numpy as np

MIN_SIZES = 4  # for three parameters
HUBER_DELTA = 1e-3  # log units; the Huber loss is quadratic below it
BOOTSTRAPS = 200  # draws of runs with replacement
MAX_EXPONENT = 3.0  # larger exponents fit noise
FLOORS = (0.3, 0.7, 0.98)
"""Floors at which fits start, as shares of the lowest loss."""
EXPONENTS = (0.1, 0.3, 0.7, 1.2)
"""Exponents at which fits start."""


@dataclass(frozen=True)
class Law:
    """A power law."""

    floor: float
    factor: float
    exponent: float
    exponent_low: float  # 95 % interval
    exponent_high: float


@dataclass(frozen=True)
class NoLaw:
    """Losses that support no law."""

    reason: str


def fit_law(x: Sequence[float], y: Sequence[float]) -> Law | NoLaw:
    """The law of losses `y` over sizes `x`, a value for each run."""
    sizes = np.asarray(x, np.float64)
    losses = np.asarray(y, np.float64)
    n_sizes = len(np.unique(sizes))
    if n_sizes < MIN_SIZES:
        return NoLaw(f"{n_sizes} sizes; a law with a floor needs {MIN_SIZES}")
    if not (np.isfinite(losses).all() and losses.min() > 0 and sizes.min() > 0):
        return NoLaw("losses or sizes that are not positive")
    # Divide sizes by their geometric mean. The factor is then the power's height in the middle of
    # the data; at size 1, far from them, it would change with each step of the exponent.
    scale = float(np.exp(np.log(sizes).mean()))
    relative_sizes = sizes / scale
    log_span = np.log(np.ptp(losses) + 1e-9)
    starts = []
    for floor_frac, exponent in product(FLOORS, EXPONENTS):
        log_floor = np.log(losses.min() * floor_frac)
        starts.append(np.array([log_span, log_floor, exponent]))
    fitted = _fit(relative_sizes, losses, starts)
    low, high = _bootstrap_interval(relative_sizes, losses, fitted)
    # an interval that reaches a bound of the exponent
    if low <= 0.01 or high >= 0.99 * MAX_EXPONENT:
        return NoLaw(f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}")
    log_factor, log_floor, exponent = fitted.tolist()
    # convert the factor to undivided sizes
    factor = float(np.exp(log_factor) * scale**exponent)
    return Law(float(np.exp(log_floor)), factor, exponent, low, high)


def _bootstrap_interval(
    sizes: np.ndarray, losses: np.ndarray, fitted: np.ndarray
) -> tuple[float, float]:
    """The 95 % interval of the exponent over draws of runs with replacement; fits start from
    `fitted`.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < BOOTSTRAPS:
        runs = generator.integers(len(sizes), size=len(sizes))
        if len(np.unique(sizes[runs])) >= MIN_SIZES - 1:
            _, _, exponent = _fit(sizes[runs], losses[runs], [fitted])
            exponents.append(float(exponent))
    low, high = np.quantile(exponents, [0.025, 0.975]).tolist()
    return low, high


def _fit(sizes: np.ndarray, losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """(3,) float64: log factor, log floor and exponent of the best fit. `sizes` and `losses` are
    (runs,) float64, and each of `starts` is like the result.
    """
    log_x = np.log(sizes)
    log_y = np.log(losses)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Huber loss of the log residuals, and its gradient."""
        log_factor, log_floor, exponent = parameters
        log_power = log_factor - exponent * log_x
        predicted = np.logaddexp(log_power, np.full_like(log_x, log_floor))
        residual = predicted - log_y
        distance = np.abs(residual)
        quadratic = residual**2 / (2 * HUBER_DELTA)
        huber = np.where(distance <= HUBER_DELTA, quadratic, distance - HUBER_DELTA / 2).sum()
        slope = np.clip(residual / HUBER_DELTA, -1, 1)  # gradient of the Huber loss by residual
        power_share = np.exp(log_power - predicted)  # share of the power in the prediction
        gradient = [
            slope @ power_share,
            slope @ (1 - power_share),
            -(slope * power_share) @ log_x,
        ]
        return float(huber), np.array(gradient)

    bounds = [(-50, 50), (-50, float(log_y.min())), (0.0, MAX_EXPONENT)]
    # imported here: it takes a fifth of a second, and few reports have a sweep
    minimize = import_module("scipy.optimize").minimize
    fits = [
        minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds) for start in starts
    ]
    return np.asarray(min(fits, key=lambda fit: float(fit.fun)).x)
