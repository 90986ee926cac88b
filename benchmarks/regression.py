"""CPU-milliseconds of the evaluation's logistic regression beside scikit-learn's solvers, and how
near each comes.

    python benchmarks/regression.py [--repeats 3] [--problems 8] [--max-cells 480]

Cells of 8 classes of unlike sizes with dense features, as embeddings and components are. All solvers minimise the same
objective, taking turns on the same problems, on one thread. The optimum is newton-cholesky's at a tolerance of 1e-12;
*other labels* is the share of new cells that get another label there.
"""

import argparse
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from origin import commit, machine
from sklearn.linear_model import LogisticRegression as Reference
from threadpoolctl import threadpool_limits

from cellmill.evaluate.classifiers.logistic import LogisticRegression

SHAPES = ((40, 128), (160, 50), (160, 128), (160, 755), (480, 128), (480, 755))
SOLVERS: dict[str, Callable[[], Any]] = {
    "cellmill": lambda: LogisticRegression(standardised=False),
    "newton-cg": lambda: Reference(solver="newton-cg", max_iter=1000),
    "lbfgs": lambda: Reference(max_iter=1000),
}


def problem(cells: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features and labels to fit, and features of new cells with a weaker signal."""
    random = np.random.default_rng(seed)
    of_cell = random.choice(8, size=3 * cells, p=np.array([35, 20, 16, 9, 7, 6, 4, 3]) / 100)
    scales = np.geomspace(3, 0.3, width)
    features = scales * (
        0.6 * random.normal(size=(8, width))[of_cell] + random.normal(size=(3 * cells, width))
    )
    return features[:cells], of_cell[:cells], 0.5 * features[cells:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns, of which medians and ranges are printed"
    )
    parser.add_argument("--problems", type=int, default=8, help="problems of each shape")
    parser.add_argument("--max-cells", type=int, default=480, help="of the shapes that are solved")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`\n"
    )
    print(
        "| cells x width | solver | CPU-ms a fit | of cellmill's | other labels |\n|---|---|---:|---:|---:|"
    )
    for cells, width in (shape for shape in SHAPES if shape[0] <= given.max_cells):
        problems = [problem(cells, width, seed) for seed in range(given.problems)]
        optimum = [
            Reference(solver="newton-cholesky", tol=1e-12).fit(x, y).predict(new)
            for x, y, new in problems
        ]
        taken: dict[str, list[float]] = {name: [] for name in SOLVERS}
        wrong = dict.fromkeys(SOLVERS, 0.0)
        for _ in range(given.repeats):
            for name, make in SOLVERS.items():
                started = time.process_time()
                fitted = [make().fit(x, y) for x, y, _ in problems]
                taken[name].append(1e3 * (time.process_time() - started) / len(problems))
                found = [model.predict(new) for model, (_, _, new) in zip(fitted, problems)]
                wrong[name] = float(np.mean([a != b for a, b in zip(found, optimum)]))
        own = statistics.median(taken["cellmill"])
        for name, times in taken.items():
            middle = statistics.median(times)
            ranges = f"{middle:.1f} ({min(times):.1f} to {max(times):.1f})"
            print(
                f"| {cells} x {width} | {name} | {ranges} | {middle / own:.1f} | {wrong[name]:.2%} |"
            )


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
