"""Probes of the metrics: predictions that are scaled or have noise added, and are never ranked.

Neither knows more of the measured change. A column in which such a row is better than the
prediction itself can be improved without predicting anything.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cellmill.evaluate.methods import Arrays
from cellmill.evaluate.scores import ScoreColumn, paired_difference, seeded
from cellmill.evaluate.tasks.perturbation.changes import ChangesByMethod
from cellmill.runs.results import ScoredMethod

SCALES = (0.5, 2.0)
ROUNDING = 1e-9  # differences below this are none, as of the Pearson of scaled changes


def name_probes(entry: ScoredMethod, noise: float) -> list[ScoredMethod]:
    """Methods of an entry's probes: its changes at each of `SCALES`, and with noise."""
    changes = [*(f"x {scale:g}" for scale in SCALES), f"with noise {noise:g}"]
    return [
        replace(entry, features=f"probe: {entry.features} {change}", kind="probe", network=None)
        for change in changes
    ]


def make_probes(
    entry: ScoredMethod, predicted: np.ndarray, units: np.ndarray, noise: float, seed: int
) -> ChangesByMethod:
    """Changes, (units, G), of an entry's probes. The noise is normal, its deviation `noise` times
    that of a unit's predicted change over genes; it depends on the seed and the unit only.
    """
    draws = [seeded(seed, (6 << 32) + unit).normal(size=predicted.shape[1]) for unit in units]
    noisy = predicted + noise * predicted.std(1, keepdims=True) * np.array(draws)
    changes = [*(scale * predicted for scale in SCALES), noisy]
    return dict(zip(name_probes(entry, noise), changes, strict=True))


def choose_probed(pearson: Arrays) -> list[ScoredMethod]:
    """The best method of the model and the best baseline, by Pearson in the first repetition."""
    entries = []
    for kind in ("model", "baseline"):
        means = {
            method: float(np.nanmean(scores[0]))
            for method, scores in pearson.items()
            if method.kind == kind and np.isfinite(scores[0]).any()
        }
        if means:
            entries.append(max(means, key=means.__getitem__))
    return entries


def find_gamed(
    column: ScoreColumn, probes: Arrays, entries: Sequence[ScoredMethod], noise: float
) -> list[str]:
    """A sentence for each entry with a better probe. `probes` are scores of the first repetition."""
    sentences = []
    sign = -1 if column.lower_is_better else 1
    for entry in entries:
        better = []
        for probe in name_probes(entry, noise):
            if entry in column.scores and probe in probes:
                difference = paired_difference(probes[probe], column.scores[entry][:1]).mean
                if sign * difference > ROUNDING:
                    better.append(f"{probe.name} (by {abs(difference):.4f})")
        if better:
            sentences.append(
                f"{column.heading}: better than the prediction itself: {', '.join(better)}; this column can be "
                "improved without a better prediction."
            )
    return sentences
