"""Power law of the lowest validation loss over sizes: loss = floor + factor * size ** -exponent.

The law is fitted to runs of several sizes, as in Hoffmann et al. 2022 (Training compute-optimal
large language models, section 3.3). A residual is the logarithm of the predicted loss minus the
logarithm of the measured loss. L-BFGS minimises the Huber loss of the residuals. It starts from each
point of a grid of initial values, and the best fit is taken. The interval of the exponent is from a
bootstrap over runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import ClassVar

import numpy as np

from cellmill.report.text import with_noun

MIN_SIZES = 4  # a fit needs at least one size more than the law has parameters
HUBER_DELTA = 1e-3  # the Huber loss is quadratic for residuals up to this, in log units
BOOTSTRAPS = 200  # number of draws of runs with replacement
INTERVAL_QUANTILES = (0.025, 0.975)  # ends of a 95 % interval
# Bounds of a fit.
MAX_EXPONENT = 3.0  # larger exponents would fit noise
MAX_ABS_LOG = 50.0  # logarithms of factor and floor are at most this far from 0
# The exponent is not determined if its interval reaches one of these two values. They are close to
# the bounds of a fit, 0 and MAX_EXPONENT.
MIN_DETERMINED = 0.01
MAX_DETERMINED = 0.99 * MAX_EXPONENT
MIN_LOSS_RANGE = 1e-9  # keeps the logarithm of the range of losses finite if all losses are equal
INITIAL_FLOORS = (0.3, 0.7, 0.98)
"""Values of the floor at which fits start, as fractions of the lowest loss."""
INITIAL_EXPONENTS = (0.1, 0.3, 0.7, 1.2)
"""Values of the exponent at which fits start."""


@dataclass(frozen=True)
class Law:
    """A power law: loss = floor + factor * size ** -exponent."""

    is_fitted: ClassVar[bool] = True
    floor: float  # loss at infinite size
    factor: float
    exponent: float
    exponent_low: float  # lower end of the exponent's 95 % interval
    exponent_high: float  # upper end of this interval


@dataclass(frozen=True)
class NoLaw:
    """Result of a fit to losses that support no power law."""

    is_fitted: ClassVar[bool] = False
    reason: str  # why the losses support no power law


def fit_law(sizes: Sequence[float], losses: Sequence[float]) -> Law | NoLaw:
    """Fit a power law to `losses` over `sizes`, both (runs,).

    Return NoLaw with a reason if the losses support no power law.
    """
    size = np.asarray(sizes, np.float64)
    loss = np.asarray(losses, np.float64)
    n_sizes = len(np.unique(size))
    if n_sizes < MIN_SIZES:
        return NoLaw(f"{with_noun(n_sizes, 'size')}; a law with a floor needs {MIN_SIZES}")
    if not (np.isfinite(loss).all() and loss.min() > 0 and size.min() > 0):
        return NoLaw("a loss or size is not a positive finite number")

    # Fit over sizes divided by their geometric mean. The factor is then the height of the power
    # above the floor in the middle of the data. Over undivided sizes, the factor would be the height
    # at size 1, far from the data, and would change much with a small change of the exponent.
    scale = float(np.exp(np.log(size).mean()))
    relative_size = size / scale
    fitted = _fit(relative_size, loss, _list_initial_values(loss))
    low, high = _bootstrap_interval(relative_size, loss, fitted)
    if low <= MIN_DETERMINED or high >= MAX_DETERMINED:
        return NoLaw(f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}")

    # convert the factor to undivided sizes
    log_factor, log_floor, exponent = fitted.tolist()
    factor = float(np.exp(log_factor) * scale**exponent)
    return Law(float(np.exp(log_floor)), factor, exponent, low, high)


def _list_initial_values(loss: np.ndarray) -> list[np.ndarray]:
    """List the parameters (log factor, log floor, exponent) at which fits start, each (3,) float64."""
    log_factor = np.log(np.ptp(loss) + MIN_LOSS_RANGE)
    initial_values = []
    for floor_frac, exponent in product(INITIAL_FLOORS, INITIAL_EXPONENTS):
        log_floor = np.log(loss.min() * floor_frac)
        initial_values.append(np.array([log_factor, log_floor, exponent]))
    return initial_values


def _bootstrap_interval(
    size: np.ndarray, loss: np.ndarray, fitted: np.ndarray
) -> tuple[float, float]:
    """Find the 95 % interval of the exponent, over draws of runs with replacement.

    `size` and `loss` are (runs,) float64. `fitted` are the parameters fitted to all runs, at which
    the fit to each draw starts.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < BOOTSTRAPS:
        runs = generator.integers(len(size), size=len(size))
        # a draw with fewer than three sizes does not count, because it cannot determine the three
        # parameters of the law
        if len(np.unique(size[runs])) >= MIN_SIZES - 1:
            _, _, exponent = _fit(size[runs], loss[runs], [fitted])
            exponents.append(float(exponent))
    low, high = np.quantile(exponents, INTERVAL_QUANTILES).tolist()
    return low, high


def _fit(size: np.ndarray, loss: np.ndarray, initial_values: Sequence[np.ndarray]) -> np.ndarray:
    """Fit the parameters (log factor, log floor, exponent) of the law, (3,) float64.

    `size` and `loss` are (runs,) float64. A fit starts from each of `initial_values`, and the best of
    these fits is returned.
    """
    # scipy is imported here because the report imports this module for `Law`, and never fits
    minimize = import_module("scipy.optimize").minimize
    log_size = np.log(size)
    log_loss = np.log(loss)
    bounds = [
        (-MAX_ABS_LOG, MAX_ABS_LOG),  # of the log factor
        (-MAX_ABS_LOG, float(log_loss.min())),  # of the log floor, which is below all losses
        (0.0, MAX_EXPONENT),  # of the exponent
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
    """Compute the Huber loss of the residuals, summed over runs. Return the loss and its gradient.

    `parameters` are (log factor, log floor, exponent), (3,) float64. `log_size` and `log_loss` are
    (runs,) float64. The gradient is by the parameters, (3,) float64.

    The loss is divided by HUBER_DELTA, so that it has slopes of ±1 where it is linear. The division
    does not move the minimum.
    """
    # log of the prediction factor * size ** -exponent + floor
    log_factor, log_floor, exponent = parameters
    log_power = log_factor - exponent * log_size
    predicted = np.logaddexp(log_power, np.full_like(log_size, log_floor))
    residual = predicted - log_loss

    # the Huber loss is quadratic for small residuals, and linear for large ones
    distance = np.abs(residual)
    quadratic = residual**2 / (2 * HUBER_DELTA)
    huber = np.where(distance <= HUBER_DELTA, quadratic, distance - HUBER_DELTA / 2).sum()

    # The gradient follows from the chain rule: the derivative of the loss by each residual, times
    # the derivative of the residual by each parameter, summed over runs.
    slope = np.clip(residual / HUBER_DELTA, -1, 1)  # (runs,), derivative of the loss by residual
    power_frac = np.exp(
        log_power - predicted
    )  # (runs,), fraction of the prediction above the floor
    gradient = [
        slope @ power_frac,  # by the log factor
        slope @ (1 - power_frac),  # by the log floor
        -(slope * power_frac) @ log_size,  # by the exponent
    ]
    return float(huber), np.array(gradient)
