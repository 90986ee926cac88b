"""A power law with a floor, y = floor + a * x ** -exponent, fitted to losses of runs of several sizes.

Hoffmann et al. 2022 (Training compute-optimal large language models, section 3.3): the Huber loss of log residuals,
minimised by L-BFGS from a grid of starts. The interval is of 200 bootstraps over the runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp

FEWEST_SIZES = 4  # for three parameters
DELTA = 1e-3  # of the Huber loss, in log units
DRAWS = 200
STEEPEST = 3.0  # exponents beyond it fit noise


@dataclass(frozen=True)
class Law:
    floor: float
    factor: float
    exponent: float
    low: float  # 95 % interval of the exponent
    high: float


def fit_law(x: Sequence[float], y: Sequence[float]) -> Law | str:
    """The law of losses `y` of runs of sizes `x`, or the reason why the data support none."""
    sizes, losses = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if (n := len(np.unique(sizes))) < FEWEST_SIZES:
        return f"{n} sizes; a law with a floor needs {FEWEST_SIZES}"
    if not (np.isfinite(losses).all() and losses.min() > 0 and sizes.min() > 0):
        return "losses or sizes that are not positive"
    scale = float(np.exp(np.log(sizes).mean()))  # around which the factor is fitted: else it moves with the exponent
    best = _fit(sizes / scale, losses, _starts(losses))
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < DRAWS:
        drawn = generator.integers(len(sizes), size=len(sizes))
        if len(np.unique(sizes[drawn])) >= FEWEST_SIZES - 1:
            exponents.append(float(_fit(sizes[drawn] / scale, losses[drawn], [best])[2]))
    low, high = np.quantile(exponents, [0.025, 0.975]).tolist()
    log_factor, log_floor, exponent = best
    if low <= 0.01 or high >= 0.99 * STEEPEST:
        return f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}"
    return Law(float(np.exp(log_floor)), float(np.exp(log_factor) * scale**exponent), float(exponent), low, high)


def _starts(losses: np.ndarray) -> list[np.ndarray]:
    lowest, span = losses.min(), np.ptp(losses) + 1e-9
    floors, exponents = (lowest * 0.3, lowest * 0.7, lowest * 0.98), (0.1, 0.3, 0.7, 1.2)
    return [np.array([np.log(span), np.log(floor), exponent]) for floor, exponent in product(floors, exponents)]


def _fit(sizes: np.ndarray, losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """log factor, log floor and exponent of the best fit."""
    log_x, log_y = np.log(sizes), np.log(losses)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        log_factor, log_floor, exponent = parameters
        parts = log_factor - exponent * log_x, np.full_like(log_x, log_floor)
        predicted = logsumexp(parts, axis=0)
        off = predicted - log_y
        loss = np.where(np.abs(off) <= DELTA, off**2 / (2 * DELTA), np.abs(off) - DELTA / 2).sum()
        slope, share = np.clip(off / DELTA, -1, 1), np.exp(parts[0] - predicted)
        return float(loss), np.array([slope @ share, slope @ (1 - share), -(slope * share) @ log_x])

    bounds = [(-50, 50), (-50, float(log_y.min())), (0.0, STEEPEST)]
    fits = [minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds) for start in starts]
    found: np.ndarray = min(fits, key=lambda fit: float(fit.fun)).x
    return found
