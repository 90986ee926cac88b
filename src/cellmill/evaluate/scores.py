"""Scores of several methods on the same cells: tables, paired differences with 95 % intervals,
verdicts and gates.

A method is features plus a classifier (a row of the table). A condition is a number of training
cells, or whatever the cells have lost (a column). All methods classify the same cells in the same
repetitions, which differ in the seeds of folds, the draws of training cells, or the draws of what
cells lose.

The classified cells and the repetitions vary, as in a crossed design. The variance of the mean
difference is the sum of both parts, each from its own clusters (two-way clustering: Cameron,
Gelbach & Miller 2011, J. Bus. Econ. Stat. 29:238). The part common to both is not subtracted, so
intervals are too wide rather than too narrow. The quantile is Student's with Satterthwaite's
degrees of freedom. Cells of different folds count as independent (Bayle, Bayle, Janson & Mackey
2020, "Cross-validation confidence intervals for test error"). The interval does not cover other
pretraining seeds, training cells, donors or batches.

The share p of a gap that a method closes is a ratio of two such differences. Its interval is the
one of the linear combination score - p * ceiling - (1 - p) * zero over the same cells and
repetitions, divided by the gap (delta method).

F1 is not a mean over cells. Its linear terms by cell are used instead (infinitesimal jackknife,
Efron 1981), which is coarse for classes of a few cells.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
from scipy.special import stdtrit

from cellmill.config.evaluate import BaselineGate
from cellmill.errors import ConfigError
from cellmill.runs.verdict import FEWEST, Closed, Gap, Verdict, compare

NOT_TESTED = -1  # predicted class of a cell that a repetition does not test
LEVEL = 0.95
EMBEDDING = "embedding"  # name of the model's features
# of a dataset's own genes, where the other features have the shared ones
FULL_PANEL = f"{EMBEDDING}, full panel"
WITH_COMPONENTS = f"{EMBEDDING} with PCA50"
# features beside the model's own: in no verdict against the best baseline
VARIANTS = (FULL_PANEL, WITH_COMPONENTS)
# after the name of features that are fitted on other cells than the model
IN_FOLDS = ", folds of scored cells"
# features of the same architecture with initial weights, a baseline as all other names
UNTRAINED = "untrained"
MAJORITY = "majority"
HALF_LABELS = "all genes with half of the labels"  # ceiling of labels
# beginning of the names of features by models of other packages: neither model nor baseline
EXTERNAL = "external: "


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float
    high: float
    # standard error over cells alone, for the same cells in runs of several pretraining seeds
    cells_se: float


def seeded(seed: int, key: int) -> np.random.Generator:
    """Random numbers of `seed` for one use, `key`."""
    return np.random.Generator(np.random.Philox(key=[seed, key]))


def draw_cells(cells: np.ndarray, most: int, seed: int, key: int) -> np.ndarray:
    """`cells` (indices, ascending), or a seeded draw of `most` of them, ascending."""
    if len(cells) <= most:
        return cells
    return np.sort(seeded(seed, key).permutation(cells)[:most])


def divide(sums: np.ndarray, n: np.ndarray) -> np.ndarray:
    """`sums` / `n`, NaN where `n` is 0."""
    return np.divide(sums, n, out=np.full(np.shape(sums), np.nan), where=n > 0)


def cell_scores(metric: str, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Scores whose mean over the tested cells of a repetition is its accuracy, macro_f1 or
    weighted_f1.

    `labels`, `(cells,)`, and `predicted`, `(repetitions, cells)`, are class numbers. Returns
    float64 of the shape of `predicted`, NaN where a cell is not tested.
    """
    scores = np.full(predicted.shape, np.nan)
    for row, classes in zip(scores, predicted):
        tested = classes != NOT_TESTED
        seen = labels[tested]
        guessed = classes[tested]
        if metric == "accuracy":
            row[tested] = seen == guessed
            continue
        # F1 plus its derivative by the weight of each cell, times the number of cells
        names = np.union1d(seen, guessed)
        weighted = metric == "weighted_f1"
        is_class = seen[:, None] == names
        called = guessed[:, None] == names
        sizes = is_class.sum(0) + called.sum(0)
        f1 = 2 * (is_class & called).sum(0) / sizes
        share = is_class.mean(0) if weighted else np.full(len(names), 1 / len(names))
        hits = 2.0 * (is_class & called) - f1 * (is_class.astype(float) + called)
        terms = len(seen) * (hits / sizes) @ share + share @ f1
        row[tested] = terms + is_class @ f1 - share @ f1 if weighted else terms
    return scores


def paired_difference(own: np.ndarray, other: np.ndarray) -> Difference:
    """Mean of `own` minus `other`, results of `cell_scores` of the same metric, with its interval."""
    differences = own - other
    tested = np.isfinite(differences)
    mean = float(differences[tested].mean())
    shares = np.where(tested, differences - mean, 0) / tested.sum()
    cells = _clustered(shares.sum(0)[tested.any(0)])
    repetitions = _clustered(shares.sum(1))
    variance = cells[0] + repetitions[0]
    if variance <= 1e-20:  # the methods differ by the same in every cell
        return Difference(mean, mean, mean, 0.0)
    freedom = variance**2 / sum(part**2 / max(n - 1, 1) for part, n in (cells, repetitions))
    half = float(stdtrit(freedom, (1 + LEVEL) / 2) * variance**0.5)
    return Difference(mean, mean - half, mean + half, cells[0] ** 0.5)


def share_closed(
    own: np.ndarray, zero: np.ndarray, ceiling: np.ndarray
) -> tuple[float, float, float] | None:
    """Share of `ceiling` minus `zero` that `own` minus `zero` is, and its interval; None if that
    gap may be 0 or less.

    Results of `cell_scores` of the same metric; where one of them is not tested, none counts.
    """
    known = np.isfinite(own + zero + ceiling)
    own, zero, ceiling = (np.where(known, scores, np.nan) for scores in (own, zero, ceiling))
    gap = paired_difference(ceiling, zero)
    if gap.low <= 0:
        return None
    share = paired_difference(own, zero).mean / gap.mean
    left = paired_difference(own - zero, share * (ceiling - zero))
    return share, share + left.low / gap.mean, share + left.high / gap.mean


def _clustered(sums: np.ndarray) -> tuple[float, int]:
    """Variance from the sums of clusters, and the number of clusters; 0 with one cluster."""
    n = len(sums)
    return (float(n / (n - 1) * (sums**2).sum()) if n > 1 else 0.0), n


def failures(gates: Iterable[BaselineGate], datasets: Mapping[str, Any]) -> list[str]:
    """A line for each gate and dataset (and label) that it fails on. Raises ConfigError for a gate
    without a row.
    """
    lines = []
    for gate in gates:
        tables = {
            f"{name}: {task}": result
            for name, dataset in datasets.items()
            for task, result in dataset["tasks"].items()
            if (task == gate.task or task.startswith(f"{gate.task} of "))
            and result["skipped"] is None
        }
        if not tables:
            raise ConfigError(
                f"evaluate.gate: task {gate.task} was skipped on every dataset: no row to compare"
            )
        for where, result in tables.items():
            own, other = (_best(gate, where, result, model) for model in (True, False))
            if (other[1] - own[1] if gate.lower_is_better else own[1] - other[1]) < gate.margin:
                more = (
                    f" and {gate.margin:g} {'less' if gate.lower_is_better else 'more'}"
                    if gate.margin
                    else ""
                )
                lines.append(
                    f"{where}: {own[0]} has {own[1]:.3f} {own[2]}, expected {other[1]:.3f} of {other[0]}{more}"
                )
    return lines


def _best(
    gate: BaselineGate, where: str, result: Mapping[str, Any], model: bool
) -> tuple[str, float, str]:
    """Name, value and column of the best row of the model, or of the gate's baseline."""
    column = gate.column or result["metric"]
    if column is None:
        raise ConfigError(f"evaluate.gate: {where}: no column ranks its rows; set column")
    neither = ("external", "variant")
    rows = [
        row
        for row in result["rows"]
        if (row.get("kind") == "model") == model and row.get("kind") not in neither
    ]
    if not model:
        rows = [
            row
            for row in rows
            if row["name"] == gate.baseline or row["name"].startswith(f"{gate.baseline} + ")
        ]
        if not rows:
            names = ", ".join(
                row["name"] for row in result["rows"] if row.get("kind") not in ("model", *neither)
            )
            raise ConfigError(
                f"evaluate.gate: {where}: no baseline {gate.baseline!r}; there are: {names}"
            )
    key = f"{column}_mean" if any(f"{column}_mean" in row for row in rows) else column
    known = [
        (row["name"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and isfinite(row[key])
    ]
    if not known:
        keys = dict.fromkeys(
            key.removesuffix("_mean") for row in rows for key in row if not key.endswith("_sd")
        )
        columns = ", ".join(
            key for key in keys if key not in ("name", "kind") and not key.endswith("_repetitions")
        )
        raise ConfigError(
            f"evaluate.gate: {where}: no numbers in column {column!r}; there are: {columns}"
        )
    name, value = (min if gate.lower_is_better else max)(known, key=lambda one: one[1])
    return name, value, column


@dataclass
class ScoreColumn:
    """One metric under one condition."""

    heading: str
    metric: str  # in words, as verdicts say it
    scores: dict[str, np.ndarray]  # of each method, as `cell_scores` returns them
    lower_is_better: bool = False
    n_units: int | None = None  # independent units, where these are not the columns of `scores`
    # scores of methods, the best of which closes 0 %
    trivial: dict[str, np.ndarray] = field(default_factory=dict)
    ceiling: tuple[str, np.ndarray] | None = None  # name and scores of what closes 100 %

    def mean(self, name: str) -> float:
        return float(np.nanmean(self.scores[name]))

    @property
    def has_baseline(self) -> bool:
        """Whether the model's rows have a baseline to be compared with."""
        return {"model", "baseline"} <= {kind_of(name) for name in self.scores}

    def best(self, own: bool, among: Collection[str] | None = None) -> str:
        """Method with the best mean: of the embedding, or of the baselines."""
        kind = "model" if own else "baseline"
        names = [
            name
            for name in self.scores
            if kind_of(name) == kind and (among is None or name in among)
        ]
        return (min if self.lower_is_better else max)(names, key=self.mean)

    def compare(self, own: str, other: str) -> Verdict:
        found = paired_difference(self.scores[own], self.scores[other])
        n = self._units(self.scores[own] - self.scores[other])
        return compare(
            own, other, self.metric, found.mean, (found.low, found.high), self.lower_is_better, n
        )

    def _units(self, scores: np.ndarray) -> int:
        return self.n_units or int(np.isfinite(scores).any(axis=0).sum())

    def gap(self) -> Gap | None:
        """Percent that the best methods close of the gap between trivial ones and the ceiling; None
        without these.
        """
        if not self.trivial or self.ceiling is None:
            return None
        sign = -1 if self.lower_is_better else 1
        name, ceiling = self.ceiling
        zero_name, zero = max(self.trivial.items(), key=lambda one: sign * np.nanmean(one[1]))
        known = np.isfinite(zero + ceiling)
        if not known.any():
            return None
        gap = Gap(
            self.heading,
            (zero_name, float(zero[known].mean())),
            (name, float(ceiling[known].mean())),
        )
        closed = []
        for row in (self.best(own=True), self.best(own=False)):
            own = self.scores[row]
            few = self._units(own + zero + ceiling) < FEWEST
            if few or (share := share_closed(sign * own, sign * zero, sign * ceiling)) is None:
                return gap
            closed.append(Closed(row, *(100 * number for number in share)))
        return replace(gap, model=closed[0], baseline=closed[1])


@dataclass
class Predictions:
    """Predicted classes of the same cells by method, condition and repetition."""

    labels: np.ndarray  # class of each cell; text
    repetitions: int
    others: tuple[str, ...] = ()  # classes that no cell has and a method may predict
    # class of each cell by `features.halves`, the ceiling; "" for none
    halves: np.ndarray | None = None
    by_condition: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Class numbers `(repetitions, cells)` int64 of each method, NOT_TESTED where a repetition does
    not test a cell.
    """

    @cached_property
    def classes(self) -> np.ndarray:
        """Classes of cells and of predictions, sorted: a class number is an index into it."""
        return np.union1d(self.labels, np.array(self.others, dtype=self.labels.dtype.type))

    def record(
        self, condition: str, repetition: int, cells: np.ndarray, classes: Mapping[str, np.ndarray]
    ) -> None:
        """Keep the predicted `classes` (text), by method, of `cells` (indices)."""
        methods = self.by_condition.setdefault(condition, {})
        for name, predicted in classes.items():
            if name not in methods:
                methods[name] = np.full((self.repetitions, len(self.labels)), NOT_TESTED)
            methods[name][repetition, cells] = np.searchsorted(self.classes, predicted)

    @cached_property
    def truth(self) -> np.ndarray:
        """Class number of each cell."""
        return np.searchsorted(self.classes, self.labels)

    def column(self, condition: str, metric: str, heading: str, words: str) -> ScoreColumn:
        """Scores by `metric`: accuracy, macro_f1 or weighted_f1."""
        methods = self.by_condition[condition]
        scores = {name: cell_scores(metric, self.truth, of) for name, of in methods.items()}
        column = ScoreColumn(heading, words, scores)
        tested = next(iter(methods.values())) != NOT_TESTED
        if self.halves is None or (metric != "accuracy" and (tested & (self.halves == "")).any()):
            return column  # an F1 over some of the cells would be another one
        number = {name: at for at, name in enumerate(self.classes)} | {"": NOT_TESTED}
        ceiling = np.array([number.get(name, len(number)) for name in self.halves])
        largest, best = (
            cell_scores(metric, self.truth, np.where(tested, of, NOT_TESTED))
            for of in (np.bincount(self.truth).argmax(), ceiling)
        )
        trivial = {MAJORITY: scores.get(MAJORITY, largest), "largest class": largest}
        return replace(column, trivial=trivial, ceiling=(HALF_LABELS, best))

    def confusion(self, condition: str, name: str) -> dict[str, Any]:
        """Predictions of a method by class, all repetitions together, as `TaskResult.confusion`."""
        counts = np.zeros(2 * (len(self.classes),), np.int64)
        for of_cells in self.by_condition[condition][name]:
            tested = of_cells != NOT_TESTED
            np.add.at(counts, (self.truth[tested], of_cells[tested]), 1)
        return {"row": name, "classes": self.classes.tolist(), "counts": counts.tolist()}

    def accuracies(self) -> list[ScoreColumn]:
        """A column for each condition."""
        return [
            self.column(name, "accuracy", name, f"accuracy, {name}") for name in self.by_condition
        ]


def kind_of(name: str) -> str:
    """Kind of a method's row: model, variant, external or baseline."""
    if name.startswith(VARIANTS) or IN_FOLDS in name:
        return "variant"
    if name.startswith(EMBEDDING):
        return "model"
    return "external" if name.startswith(EXTERNAL) else "baseline"


def by_features(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of rows, `FEATURES + METHOD` each, by features."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(" + ")[0], []).append(name)
    return groups


def table_rows(columns: Iterable[ScoreColumn]) -> list[dict[str, Any]]:
    """A row for each method: mean, sd and single values over repetitions in each column; None where
    it lacks one.
    """
    columns = list(columns)
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column.scores):
        row: dict[str, Any] = {"name": name, "kind": kind_of(name)}
        for column in columns:
            shown: tuple[Any, ...] = (None, None, None)
            if name in column.scores:
                values = np.nanmean(column.scores[name], axis=1)
                shown = column.mean(name), float(values.std(ddof=len(values) > 1)), values.tolist()
            row |= {
                f"{column.heading}_{ending}": value
                for ending, value in zip(("mean", "sd", "repetitions"), shown)
            }
        rows.append(row)
    return rows


def differences(columns: Iterable[ScoreColumn]) -> list[dict[str, Any]]:
    """Every method of the embedding minus every other, in each column."""
    lines = []
    for column in columns:
        own = [name for name in column.scores if name.startswith(EMBEDDING)]
        others = [name for name in column.scores if name not in own]
        lines += [difference(column, name, other) for name in own for other in others]
    return lines


def difference(column: ScoreColumn, compared: str, against: str) -> dict[str, Any]:
    """One entry of `differences`."""
    found = paired_difference(column.scores[compared], column.scores[against])
    return {"column": column.heading, "compared": compared, "against": against} | asdict(found)


def against_best(columns: Iterable[ScoreColumn]) -> list[Verdict]:
    """The best method of the embedding against the best baseline, in each column.

    Both are chosen by their scores on the tested cells; the baselines, which are more, gain more by
    it.
    """
    return [column.compare(column.best(own=True), column.best(own=False)) for column in columns]
