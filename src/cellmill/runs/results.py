"""Results of an evaluation. Tasks return these classes; metrics.json is written from and read into them.

metrics.json has `format`, `model` (digest of model.safetensors, vocabulary_digest, step, objective,
supervised_by), `fingerprint` of the training shards, the resolved `options`, and `datasets` by
name, the stem of the cells file. Each class below is one JSON object with its fields as keys. Rows
also have their `name`, gaps `words` and tasks `sentences`: texts for people, made from the other
fields and not read again.

A comparison is ahead or behind only if the 95 % interval of the difference excludes 0; otherwise the
two are level. A comparison is undecided if the interval says nothing: with fewer than `MIN_UNITS`
independent units (perturbations, donors), if the difference is the same in all of them, if the
difference and both ends print as 0.000, or if the difference is NaN.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from cellmill.errors import DataError
from cellmill.files import read_own_json, write_json

FORMAT = 2  # of metrics.json
TOLERANCE = 5e-4  # differences below this print as 0.000: neither is ahead
FAST_MARK = " (effort fast)"
# fewest independent units for an interval: with two, the quantile of Student's t is 12.7
MIN_UNITS = 3
Kind = Literal["model", "variant", "baseline", "external", "ceiling", "probe"]
Outcome = Literal["ahead", "level", "behind", "undecided"]


@dataclass(frozen=True)
class ScoredMethod:
    """Features of cells or genes, and the classifier or regression on them, if there is one."""

    features: str
    classifier: str = ""
    kind: Kind = "baseline"
    """variant: features beside the model's own, in no comparison with the best baseline; external:
    a model of another package; ceiling: no method, but the best score that the data allow; probe:
    another row's prediction, changed to test the metric.
    """
    # the network that computes the features: the model, or the same one with initial weights
    network: Literal["trained", "untrained"] | None = None
    supervised: str = ""  # in words, the labels that the model was trained with

    @property
    def features_name(self) -> str:
        return f"{self.features}, {self.supervised}" if self.supervised else self.features

    @property
    def name(self) -> str:
        """Name of the row, unique in its table."""
        if self.classifier:
            return f"{self.features_name} + {self.classifier}"
        return self.features_name


@dataclass(frozen=True)
class Score:
    """Scores of one method in one column; a mean of None is not shown."""

    mean: float | None
    sd: float | None = None  # over repetitions; None if fewer than two tested a unit
    repetitions: list[float | None] = field(default_factory=list)  # None: it tested no unit


@dataclass(frozen=True)
class Row:
    """Row of a task's table."""

    method: ScoredMethod
    scores: dict[str, Score] = field(default_factory=dict)  # by column
    numbers: dict[str, Any] = field(default_factory=dict)  # further columns of single values

    def cell(self, column: str) -> Any:
        """The mean or the single value in a column; None if it has neither."""
        score = self.scores.get(column)
        return self.numbers.get(column) if score is None else score.mean

    def value(self, column: str) -> float | None:
        """The mean or the number in a column; None if it has neither."""
        value = self.cell(column)
        return value if isinstance(value, int | float) else None

    def sd(self, column: str) -> float | None:
        """Standard deviation over repetitions in a column; None if there were fewer than two."""
        score = self.scores.get(column)
        return None if score is None else score.sd


@dataclass(frozen=True)
class Verdict:
    """Comparison of two methods, each by name."""

    compared: str
    against: str
    metric: str
    difference: float  # `compared` minus `against`, in the metric
    interval: tuple[float, float] | None
    """95 % interval of the difference; None if none was estimated: then the difference decides."""
    outcome: Outcome
    n: int | None = None  # independent units of an undecided comparison
    effort: Literal["fast", "full"] = "full"  # `evaluate.effort`
    column: str | None = None  # of the table; None in results of earlier versions

    @property
    def sentence(self) -> str:
        """The verdict in words, with the difference and its interval."""
        mark = FAST_MARK if self.effort == "fast" else ""
        return f"{self._words}{mark}."

    @property
    def _words(self) -> str:
        interval = "" if self.interval is None else " ({:+.3f} to {:+.3f})".format(*self.interval)
        signed = f"{self.difference:+.3f} {self.metric}{interval}"
        if self.outcome == "undecided":
            if _prints_as_zero(self.difference, self.interval):
                same = f"{self.compared} is the same as {self.against}"
                return f"{same} to three decimals of {self.metric}: undecided"
            reason = "no number" if isnan(self.difference) else f"n = {self.n}"
            if self.n is not None and self.n >= MIN_UNITS:
                reason = f"all {self.n:,} differ by the same"
            return f"{self.compared} against {self.against}: {signed}, undecided, {reason}"
        interval = interval or " (no interval)"
        if self.outcome == "level":
            signed = f"{self.difference:+.3f} {self.metric}{interval}"
            return f"{self.compared} is level with {self.against}: {signed}"
        relation = "is ahead of" if self.outcome == "ahead" else "is behind"
        size = f"{abs(self.difference):.3f} {self.metric}{interval}"
        return f"{self.compared} {relation} {self.against} by {size}"


def compare(
    compared: str,
    against: str,
    metric: str,
    difference: float,
    interval: tuple[float, float] | None = None,
    lower_is_better: bool = False,
    n: int | None = None,
) -> Verdict:
    """Return the verdict on a difference over `n` independent units; None if they were not counted."""
    if isnan(difference) or _prints_as_zero(difference, interval):
        return Verdict(compared, against, metric, difference, interval, "undecided")
    if n is not None and interval is not None:
        has_width = interval[0] < interval[1]
        if n < MIN_UNITS or not has_width:
            shown = interval if has_width else None
            return Verdict(compared, against, metric, difference, shown, "undecided", n)
    low, high = interval or (difference, difference)
    outcome: Outcome = "level"
    if abs(difference) >= TOLERANCE and not low <= 0 <= high:
        outcome = "ahead" if (difference > 0) != lower_is_better else "behind"
    return Verdict(compared, against, metric, difference, interval, outcome)


def _prints_as_zero(difference: float, interval: tuple[float, float] | None) -> bool:
    """True if the difference and both ends of its interval print as 0.000."""
    return interval is not None and max(map(abs, (difference, *interval))) < TOLERANCE


@dataclass(frozen=True)
class Difference:
    """Paired difference of two methods, each by name, in one column, with its 95 % interval."""

    column: str
    compared: str
    against: str
    mean: float
    low: float
    high: float
    # standard error over units only; in leave_out and map over cells, although `n` counts batches or donors
    cells_se: float
    n: int | None = None  # independent units; None in results of earlier versions

    def judge(self, metric: str, lower_is_better: bool) -> Verdict:
        """The verdict on the difference; `metric` is in words."""
        names = self.compared, self.against
        interval = self.low, self.high
        verdict = compare(*names, metric, self.mean, interval, lower_is_better, self.n)
        return replace(verdict, column=self.column)


@dataclass(frozen=True)
class Closed:
    """Percent of a gap that a method closes, with its 95 % interval; over 100 above the ceiling."""

    name: str
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Gap:
    """Gap in a column between the best trivial method and a ceiling, each by name and score."""

    column: str
    zero: tuple[str, float]
    ceiling: tuple[str, float]
    # what the best row of each kind closes; None with too few units, or if the ceiling is not
    # significantly better
    model: Closed | None = None
    baseline: Closed | None = None
    n: int | None = None  # independent units, if these are too few

    @property
    def words(self) -> str:
        """The gap in words that follow the name of the model's row, if there is a scale."""
        zero = "{} ({:.3f})".format(*self.zero)
        ceiling = "{} ({:.3f})".format(*self.ceiling)
        if self.model is None or self.baseline is None:
            if self.n is not None:
                return (
                    f"no scale from {zero} to {ceiling}: n = {self.n}, expected {MIN_UNITS} or more"
                )
            return f"no scale: {ceiling} is not clearly better than {zero}"
        percent, low, high = map(round, (self.model.percent, self.model.low, self.model.high))
        return (
            f"closes {percent} % ({low} to {high}) of the gap from {zero} to {ceiling}; the best "
            f"baseline, {self.baseline.name}, closes {round(self.baseline.percent)} %"
        )

    @property
    def sentence(self) -> str:
        name = f"{self.model.name} " if self.model else ""
        return f"{self.column}: {name}{self.words}."


@dataclass(frozen=True)
class Confusion:
    """Cells of each true class (rows of `counts`) by predicted class, all repetitions together."""

    row: str  # name of the method
    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class TaskResult:
    """Result of a task on one dataset. Missing numbers are None, not NaN."""

    rows: list[Row] = field(default_factory=list)
    metric: str | None = None
    """Column that ranks the rows, higher is better: drawn, and compared between runs."""
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # single values beside the table
    skipped: str | None = None  # reason why the task does not apply to the dataset
    differences: list[Difference] = field(default_factory=list)  # not shown
    confusion: Confusion | None = None
    gaps: list[Gap] = field(default_factory=list)  # of each column with a natural scale
    lower_is_better: list[str] = field(default_factory=list)  # columns of errors
    notes: list[str] = field(default_factory=list)  # further sentences
    # further tables by title; all rows of a table have the same columns
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    task: str = ""  # name in `evaluate.tasks`; results for further labels are kept under others

    @property
    def sentences(self) -> list[str]:
        verdicts = [verdict.sentence for verdict in self.verdicts]
        return verdicts + [gap.sentence for gap in self.gaps] + self.notes

    @property
    def effort_mark(self) -> str:
        """The mark of verdicts of effort fast; empty for a full effort."""
        is_fast = any(verdict.effort == "fast" for verdict in self.verdicts)
        return FAST_MARK if is_fast else ""

    @property
    def ranked_rows(self) -> list[Row]:
        """Rows of methods with a value of the metric; empty if no metric ranks the rows."""
        rows = [row for row in self.rows if row.value(self.metric or "") is not None]
        return [row for row in rows if row.method.kind not in ("ceiling", "probe")]

    def rank_value(self, row: Row) -> float:
        """Value of a ranked row in the metric."""
        value = row.value(self.metric or "")
        assert value is not None
        return value

    def best_row(self, kind: Kind | None = None) -> Row | None:
        """The row with the highest metric, of any kind or of `kind`; None if there is no row."""
        rows = [row for row in self.ranked_rows if kind in (None, row.method.kind)]
        return max(rows, key=self.rank_value, default=None)

    def find_verdict(self, column: str) -> Verdict | None:
        """The first of `best_verdicts` that is on a column; None if there is none."""
        found = (one for one in self.best_verdicts() if column in self._columns_of(one))
        return next(found, None)

    def best_baseline(self, column: str) -> Row | None:
        """The baseline of `find_verdict`; without a verdict, the best in the column, also if untrained."""
        verdict = self.find_verdict(column)
        rows = [row for row in self.rows if row.method.kind == "baseline"]
        if verdict is not None:
            rows = [row for row in rows if row.method.name == verdict.against]
        valued = [row for row in rows if row.value(column) is not None]
        choose = min if column in self.lower_is_better else max
        return choose(valued, key=lambda row: row.value(column) or 0.0, default=None)

    def best_verdicts(self) -> list[Verdict]:
        """The first verdict against a baseline in each metric.

        It is against the best baseline. If that is the model's untrained network, and the model is
        ahead of it, the verdict against the best other baseline replaces it.
        """
        baselines = [row.method for row in self.rows if row.method.kind == "baseline"]
        others = {method.name for method in baselines if method.network != "untrained"}
        names = {method.name for method in baselines}
        first_by_metric: dict[str, Verdict] = {}
        for verdict in self.verdicts:
            if verdict.against in names:
                first_by_metric.setdefault(verdict.metric, verdict)
        verdicts = []
        for verdict in first_by_metric.values():
            best: Verdict | None = verdict
            if verdict.outcome == "ahead" and verdict.against not in others:
                best = self._compare_with_nearest(verdict, others)
            if best is not None:
                verdicts.append(best)
        return verdicts

    def _columns_of(self, verdict: Verdict) -> set[str]:
        """Column of a verdict: stored, or all with its difference, or else one named like its metric."""
        wanted = verdict.compared, verdict.against, verdict.difference
        found = {d.column for d in self.differences if (d.compared, d.against, d.mean) == wanted}
        return {verdict.column} if verdict.column else found or {verdict.metric}

    def _compare_with_nearest(self, verdict: Verdict, baselines: set[str]) -> Verdict | None:
        """The verdict on the same method against the best of `baselines` in the same columns.

        All of them are worse than the baseline of `verdict`, so the best one has the smallest
        difference. None if there is no difference from any of them.
        """
        columns = self._columns_of(verdict)
        differences = [
            difference
            for difference in self.differences
            if difference.compared == verdict.compared
            and difference.column in columns
            and difference.against in baselines
        ]
        if not differences:
            return None
        nearest = min(differences, key=lambda difference: abs(difference.mean))
        found = nearest.judge(verdict.metric, lower_is_better=verdict.difference < 0)
        return replace(found, effort=verdict.effort, column=verdict.column and nearest.column)

    def mark_fast(self, left_out: str) -> Self:
        """The result, marked as of effort fast; `left_out` says what it lacks."""
        return replace(
            self,
            verdicts=[replace(verdict, effort="fast") for verdict in self.verdicts],
            notes=[*self.notes, f"Effort fast left out {left_out}."],
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON, with the texts for people."""
        fields = asdict(self)
        fields["rows"] = [
            {"name": row.method.name, **entry} for row, entry in zip(self.rows, fields["rows"])
        ]
        for verdict in fields["verdicts"]:
            if verdict["effort"] == "full":
                del verdict["effort"]
        fields["gaps"] = [
            entry | {"words": gap.words} for gap, entry in zip(self.gaps, fields["gaps"])
        ]
        return fields | {"sentences": self.sentences}


@dataclass(frozen=True)
class DatasetResult:
    """Results of the tasks on one dataset."""

    n_cells: int
    n_scored: int
    cells: str  # `evaluate.cells`: heldout or all
    n_without_genes: int
    roles: dict[str, str]  # obs column by role, such as label or `label 2`
    tasks: dict[str, TaskResult]  # by name, `NAME of LABEL` for further labels
    genes: dict[str, Any] | None = None  # `GeneCoverage`
    in_corpus: bool = True
    # cells with other names than training or validation cells, but equal counts or the barcode of a
    # training sample: not held out
    n_copies: int = 0
    supervised: str | None = None  # in words, for a model that was trained with labels
    # of the names, labels and other roles of the scored cells; None in results of earlier versions
    scored_digest: str | None = None

    @property
    def n_seen(self) -> int:
        """Cells that are not scored because they, or copies of them, are in training or validation."""
        return self.n_cells - self.n_scored - self.n_without_genes


@dataclass(frozen=True)
class Evaluation:
    """Content of metrics.json."""

    datasets: dict[str, DatasetResult]
    model: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def results(self) -> Iterator[tuple[str, str, TaskResult]]:
        """Dataset, task and result of each task."""
        for name, dataset in self.datasets.items():
            for task, result in dataset.tasks.items():
                yield name, task, result


def write(path: Path, evaluation: Evaluation) -> None:
    """Write metrics.json."""
    datasets = {}
    for name, dataset in evaluation.datasets.items():
        tasks = {task: result.to_json() for task, result in dataset.tasks.items()}
        datasets[name] = vars(dataset) | {"tasks": tasks}
    write_json(path, {"format": FORMAT, **vars(evaluation), "datasets": datasets})


def read(path: Path) -> Evaluation:
    """Read metrics.json. Raise DataError if it is damaged or has another format."""
    content = read_own_json(path)
    stored_format = content.get("format") if isinstance(content, dict) else None
    if stored_format != FORMAT:
        raise DataError(
            f"{path}: expected results of format {FORMAT}, got {stored_format}: they were written by another "
            "version of cellmill; evaluate again"
        )
    try:
        return _make_adapter().validate_python(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path}: damaged: {key}: {problem['msg']}; make it again") from None


@cache
def _make_adapter() -> TypeAdapter[Evaluation]:
    return TypeAdapter(Evaluation)
