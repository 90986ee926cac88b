"""Power law of the lowest validation loss over sizes, loss = floor + factor * size ** -exponent.

It is fitted to runs of several sizes as in Hoffmann et al. 2022 (Training compute-optimal large
language models, section 3.3): L-BFGS minimises the Huber loss of log residuals, divided by its
delta, from a grid of initial values. The exponent's interval is bootstrapped over runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import ClassVar

import numpy as np

from cellmill.report.text import with_noun

MIN_SIZES = 4  # one more than the law has parameters
HUBER_DELTA = 1e-3  # log units; the Huber loss is quadratic below it
BOOTSTRAPS = 200  # draws of runs with replacement
INTERVAL_QUANTILES = (0.025, 0.975)  # ends of a 95 % interval
# bounds of a fit; larger exponents fit noise, and e ** 50 is beyond any loss or factor
MAX_EXPONENT = 3.0
MAX_ABS_LOG = 50.0
# an interval of the exponent that reaches outside these touches a bound of the fit
MIN_DETERMINED = 0.01
MAX_DETERMINED = 0.99 * MAX_EXPONENT
MIN_LOSS_RANGE = 1e-9  # keeps the logarithm of the range finite if all losses are equal
INITIAL_FLOORS = (0.3, 0.7, 0.98)
"""Floors at which fits start, as fractions of the lowest loss."""
INITIAL_EXPONENTS = (0.1, 0.3, 0.7, 1.2)
"""Exponents at which fits start."""


@dataclass(frozen=True)
class Law:
    """A power law: loss = floor + factor * size ** -exponent."""

    is_fitted: ClassVar[bool] = True
    floor: float  # loss at infinite size
    factor: float
    exponent: float
    exponent_low: float  # 95 % interval
    exponent_high: float


@dataclass(frozen=True)
class NoLaw:
    """Losses that support no law."""

    is_fitted: ClassVar[bool] = False
    reason: str


def fit_law(sizes: Sequence[float], losses: Sequence[float]) -> Law | NoLaw:
    """The law of `losses` over `sizes`, both (runs,)."""
    size = np.asarray(sizes, np.float64)
    loss = np.asarray(losses, np.float64)
    n_sizes = len(np.unique(size))
    if n_sizes < MIN_SIZES:
        return NoLaw(f"{with_noun(n_sizes, 'size')}; a law with a floor needs {MIN_SIZES}")
    if not (np.isfinite(loss).all() and loss.min() > 0 and size.min() > 0):
        return NoLaw("a loss or size is not a positive finite number")
    # Divide sizes by their geometric mean. The factor is then the power's height in the middle of
    # the data; at size 1, far from them, it would change with each step of the exponent.
    scale = float(np.exp(np.log(size).mean()))
    relative_size = size / scale
    fitted = _fit(relative_size, loss, _list_initial_values(loss))
    low, high = _bootstrap_interval(relative_size, loss, fitted)
    if low <= MIN_DETERMINED or high >= MAX_DETERMINED:
        return NoLaw(f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}")
    log_factor, log_floor, exponent = fitted.tolist()
    # convert the factor to undivided sizes
    factor = float(np.exp(log_factor) * scale**exponent)
    return Law(float(np.exp(log_floor)), factor, exponent, low, high)


def _list_initial_values(loss: np.ndarray) -> list[np.ndarray]:
    """Parameters (log factor, log floor, exponent) at which fits start, each (3,) float64."""
    log_factor = np.log(np.ptp(loss) + MIN_LOSS_RANGE)
    initial_values = []
    for floor_frac, exponent in product(INITIAL_FLOORS, INITIAL_EXPONENTS):
        log_floor = np.log(loss.min() * floor_frac)
        initial_values.append(np.array([log_factor, log_floor, exponent]))
    return initial_values


def _bootstrap_interval(
    size: np.ndarray, loss: np.ndarray, fitted: np.ndarray
) -> tuple[float, float]:
    """95 % interval of the exponent over draws of runs with replacement. Fits start from `fitted`."""
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < BOOTSTRAPS:
        runs = generator.integers(len(size), size=len(size))
        # three sizes still determine the law's three parameters
        if len(np.unique(size[runs])) >= MIN_SIZES - 1:
            _, _, exponent = _fit(size[runs], loss[runs], [fitted])
            exponents.append(float(exponent))
    low, high = np.quantile(exponents, INTERVAL_QUANTILES).tolist()
    return low, high


def _fit(size: np.ndarray, loss: np.ndarray, initial_values: Sequence[np.ndarray]) -> np.ndarray:
    """Parameters (log factor, log floor, exponent) of the best fit, (3,) float64.

    `size` and `loss` are (runs,) float64. A fit starts from each of `initial_values`.
    """
    # imported here because the report imports this module for `Law` and never fits
    minimize = import_module("scipy.optimize").minimize
    log_size = np.log(size)
    log_loss = np.log(loss)
    bounds = [
        (-MAX_ABS_LOG, MAX_ABS_LOG),
        (-MAX_ABS_LOG, float(log_loss.min())),
        (0.0, MAX_EXPONENT),
    ]
    fits = []
    for parameters in initial_values:
        fit = minimize(
            _compute_huber_loss,
            parameters,
            args=(log_size, log_loss),
            method="L-BFGS-B",
            jac=True,
            bounds=bounds,
        )
        fits.append(fit)
    best = min(fits, key=lambda fit: float(fit.fun))
    return np.asarray(best.x)


def _compute_huber_loss(
    parameters: np.ndarray, log_size: np.ndarray, log_loss: np.ndarray
) -> tuple[float, np.ndarray]:
    """Huber loss of the log residuals divided by HUBER_DELTA, summed over runs, and its gradient.

    The division gives the linear parts slopes of ±1, and leaves the minimum where it is. The
    gradient is by the parameters, (3,) float64. `log_size` and `log_loss` are (runs,) float64.
    """
    log_factor, log_floor, exponent = parameters
    log_power = log_factor - exponent * log_size
    predicted = np.logaddexp(log_power, np.full_like(log_size, log_floor))
    residual = predicted - log_loss
    distance = np.abs(residual)
    quadratic = residual**2 / (2 * HUBER_DELTA)
    huber = np.where(distance <= HUBER_DELTA, quadratic, distance - HUBER_DELTA / 2).sum()
    slope = np.clip(residual / HUBER_DELTA, -1, 1)  # gradient of the divided loss by residual
    power_frac = np.exp(log_power - predicted)  # fraction of the prediction above the floor
    gradient = [
        slope @ power_frac,
        slope @ (1 - power_frac),
        -(slope * power_frac) @ log_size,
    ]
    return float(huber), np.array(gradient)
