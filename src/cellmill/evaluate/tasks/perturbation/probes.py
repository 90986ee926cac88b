"""Probes of the metrics: rows with the prediction of another row, scaled or with noise added.

A probe knows no more of the measured change than the prediction that it changes. If a probe scores
better, the column can be improved without a better prediction. Probes are never ranked.
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

SCALES = (0.5, 2.0)
ROUNDING = 1e-9  # smaller differences are rounding errors, such as of the Pearson of scaled changes


def name_probes(method: ScoredMethod, noise: float) -> list[ScoredMethod]:
    """Probes of a method: its predictions at each of `SCALES`, and with noise."""
    endings = [*(f"x {scale:g}" for scale in SCALES), f"with noise {noise:g}"]
    return [
        replace(method, features=f"probe: {method.features} {ending}", kind="probe", network=None)
        for ending in endings
    ]


def make_probes(
    method: ScoredMethod, predicted: np.ndarray, units: np.ndarray, noise: float, seed: int
) -> ChangesByMethod:
    """Changes, (units, G) float64 each, of the probes of a method whose changes are `predicted`.

    The noise is normal. Its standard deviation is `noise` times the standard deviation over genes of a
    unit's predicted change. It depends on the seed and the unit only.
    """
    generators = [seeded(seed, (draws.PROBE_NOISE << 32) + unit) for unit in units]
    noises = [generator.normal(size=predicted.shape[1]) for generator in generators]
    noisy = predicted + noise * predicted.std(1, keepdims=True) * np.array(noises)
    changes = [*(scale * predicted for scale in SCALES), noisy]
    return dict(zip(name_probes(method, noise), changes, strict=True))


def choose_best_methods(pearson: ByMethod) -> list[ScoredMethod]:
    """The best method of the model and the best baseline, by Pearson in the first repetition."""
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
    """A sentence for each of `methods` with a better probe, with the paired differences and their
    intervals. `probes` are scores of the first repetition, `(1, perturbations)`.
    """
    sentences = []
    for method in methods:
        better = []
        outcomes = set()
        for probe in name_probes(method, noise):
            if method not in column.scores or probe not in probes:
                continue
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
