"""Probes of the metrics. A probe is a row with the prediction of another row, scaled or with noise added.

A probe knows no more about the measured change than the prediction that it alters. If the probe scores
better, scores of the metric can rise without a better prediction. Probes are never ranked.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.evaluate.tasks.perturbation.baselines import ChangesByMethod
from cellmill.runs.results import ScoredMethod

SCALES = (0.5, 2.0)  # factors of the scaled predictions
# Differences of scores up to this number are rounding errors. For example, scaled predictions have the
# same Pearson correlation up to rounding.
ROUNDING = 1e-9


def name_probes(method: ScoredMethod, noise: float) -> list[ScoredMethod]:
    """The probes of a method: its predictions times each of SCALES, and its predictions with noise."""
    endings = [*(f"x {scale:g}" for scale in SCALES), f"with noise {noise:g}"]
    return [
        replace(method, features=f"probe: {method.features} {ending}", kind="probe", network=None)
        for ending in endings
    ]


def make_probes(
    method: ScoredMethod, predicted: np.ndarray, units: np.ndarray, noise: float, seed: int
) -> ChangesByMethod:
    """Predicted changes of the probes of `method`, (units, genes) float64 by probe.

    `predicted`, (units, genes), are the predictions of the method, and `units` the indices of these
    units. The noise of a unit is normal. Its standard deviation is `noise` times the standard deviation
    of the unit's predicted change over genes. The noise depends on the seed and on the unit only.
    """
    generators = [seeded(seed, (draws.PROBE_NOISE << 32) + unit) for unit in units]
    normal = np.array([generator.normal(size=predicted.shape[1]) for generator in generators])
    noisy = predicted + noise * predicted.std(1, keepdims=True) * normal
    changes = [*(scale * predicted for scale in SCALES), noisy]
    return dict(zip(name_probes(method, noise), changes, strict=True))


def choose_best_methods(pearson: ByMethod) -> list[ScoredMethod]:
    """The best method of the model and the best baseline, by the mean Pearson in the first repetition.
    A kind without a Pearson has no best method.

    `pearson` has scores (repetitions, perturbations) by method.
    """
    best_methods = []
    for kind in ("model", "baseline"):
        means = {
            method: float(np.nanmean(scores[0]))
            for method, scores in pearson.items()
            if method.kind == kind and np.isfinite(scores[0]).any()
        }
        if means:
            best_methods.append(max(means, key=means.__getitem__))
    return best_methods


def describe_better_probes(
    column: ScoreColumn, probes: ByMethod, methods: Sequence[ScoredMethod], noise: float
) -> list[str]:
    """A sentence for each method that has a better probe. It says the paired differences of scores and
    their intervals.

    `column` has the scores of `methods`. `probes` are the scores of probes by the same metric, in the
    first repetition only, (1, perturbations). `noise` is the noise in the names of the probes.
    """
    sentences = []
    for method in methods:
        better = []
        outcomes = set()
        for probe in name_probes(method, noise):
            if method not in column.scores or probe not in probes:
                continue
            # the difference of the probe and its method in the first repetition
            pair = {method: column.scores[method][:1], probe: probes[probe]}
            verdict = replace(column, scores=pair).verdict(probe, method)
            gain = -verdict.difference if column.lower_is_better else verdict.difference
            if gain > ROUNDING:
                low, high = verdict.interval or (verdict.difference, verdict.difference)
                better.append(f"{probe.name} {verdict.difference:+.4f} ({low:+.4f} to {high:+.4f})")
                outcomes.add(verdict.outcome)
        if better:
            reading = "this may be chance"
            if "ahead" in outcomes:
                reading = "this column can be improved without a better prediction"
            sentences.append(
                f"{column.heading}: better than the prediction itself: {'; '.join(better)}: {reading}."
            )
    return sentences
