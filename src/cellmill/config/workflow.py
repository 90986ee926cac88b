"""The whole configuration: defaults for each section, corpora, and runs and sweeps that may override any of them.

`Workflow.section(stage, name)` is what a rule passes to its stage: only the options that stage reads, so that a
changed key reruns those stages and no others. A sweep is a set of runs, the product of values of some options, with
names made from the values.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self, get_origin

from pydantic import BaseModel, Field, field_validator, model_validator

from cellmill.config.checks import check_together
from cellmill.config.corpus import IS_CONTROL, NOT_WILDCARD, ORGANISM
from cellmill.config.datasets import Dataset, check_name, read_datasets
from cellmill.config.evaluate import PRESETS, check_transfer
from cellmill.config.options import (
    OPTIONS,
    ConsolidateOptions,
    EvaluateOptions,
    KnockOutOptions,
    PlanOptions,
    PredictOptions,
    PreprocessOptions,
    ShardOptions,
    VocabularyOptions,
)
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tasks import ReconstructConfig
from cellmill.config.plugin import validated
from cellmill.config.published import PublishedFolder
from cellmill.config.run import Report
from cellmill.config.section import EachOnce, Section, part_of
from cellmill.errors import ConfigError, did_you_mean

MOST_RUNS = 10_000
_COLUMNS = {  # of results.csv, beside the axes
    "run", "parameters", "cells", "steps", "cells_seen", "gpu_hours", "cpu_core_hours",
    "dataset", "task", "name", "kind", "metric", "value", "sd",
}  # fmt: skip
Point = tuple[str, dict[str, Any]]  # as it stands in the run's name, and value by option


class Sweep(Section):
    """Runs that differ in the options of `over`, one for each combination of their values.

    The run of a combination is called after the sweep and the values, such as `size-seed0-hidden128`.
    """

    run: dict[str, Any] = Field(description="Shared by all its runs: `corpus`, and any key of a run.")
    over: dict[str, list[Any] | dict[str, dict[str, Any]]] = Field(min_length=1)
    """Values by option, such as `train.seed: [0, 1]`; or, under a name of your own, named points that set several
    options at once, such as `layout: {ddp: {parallel.strategy: ddp}, pp: {parallel.pp: 2}}`."""


def expand(sweeps: Any, taken: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """Runs of all sweeps, and each one's values by axis; `taken` are other runs. Raises ConfigError."""
    runs: dict[str, Any] = {}
    values: dict[str, dict[str, dict[str, Any]]] = {}
    for name, sweep in mapping(sweeps, "sweep").items():
        where = f"sweep.{name}"
        sweep = mapping(sweep, where)
        if wrong := [key for key in (name, *mapping(sweep.get("over") or {}, where)) if not isinstance(key, str)]:
            raise ConfigError(f"{where}: YAML reads a name as {wrong[0]}; add a letter to it")
        if missing := [key for key in ("run", "over") if not sweep.get(key)]:
            raise ConfigError(f"{where}.{missing[0]}: is missing")
        axes = {str(axis): list(_points(axis, given, where)) for axis, given in mapping(sweep["over"], where).items()}
        if taken_names := sorted(axes.keys() & _COLUMNS):
            raise ConfigError(f"{where}.over.{taken_names[0]}: is a column of results.csv; give the axis another name")
        if (n := prod(map(len, axes.values()))) > MOST_RUNS:
            raise ConfigError(f"{where}: {n:,} runs; leave out values, or make sweeps of at most {MOST_RUNS:,}")
        for combination in product(*axes.values()):
            run = "-".join([name, *(label for label, _ in combination)])
            try:
                check_name(run)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}; name its values, as {{NAME: {{OPTION: VALUE}}}}") from None
            if run in runs or run in taken:
                raise ConfigError(f"{where}: two runs are called {run}; give one of its values another name")
            changes = [change for _, options in combination for change in options.items()]
            runs[run] = _changed(mapping(sweep["run"], f"{where}.run"), changes, where)
            shown = {axis: _shown(axis, label, options) for axis, (label, options) in zip(axes, combination)}
            values.setdefault(name, {})[run] = shown
    return runs, values


def _points(axis: str, given: Any, where: str) -> Iterator[Point]:
    where = f"{where}.over.{axis}"
    if isinstance(given, dict) and given:
        for label, options in given.items():
            yield str(label), mapping(options, f"{where}.{label}")
    elif isinstance(given, list) and given:
        if repeated := [value for place, value in enumerate(given) if value in given[:place]]:
            raise ConfigError(f"{where}: {repeated[0]} is there twice; leave one out")
        for value in given:
            if isinstance(value, dict | list):
                raise ConfigError(f"{where}: {value} has no name; write it as {{NAME: {{OPTION: VALUE}}}}")
            known = {"True": "yes", "False": "no", "None": "null"}  # by repr: 1 equals True
            yield f"{axis.rsplit('.', 1)[-1]}{known.get(repr(value), value)}", {axis: value}
    else:
        raise ConfigError(f"{where}: expected a list of values, or a mapping of names to options, got {given!r}")


def _shown(axis: str, label: str, options: dict[str, Any]) -> Any:
    """Value of an axis in tables and figures: its option's value, or the point's name."""
    if list(options) != [axis] or isinstance(value := options[axis], dict | list):
        return label
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML reads 3e-4 as text
    return value


def _changed(run: dict[str, Any], changes: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """A copy of `run` with options, as `section.key`, set."""
    run = dict(run)
    for option, value in changes:
        *sections, key = str(option).split(".")
        at = run
        for section in sections:
            at[section] = dict(mapping(at.get(section) or {}, f"{where}.run.{section}"))
            at = at[section]
        at[key] = value
    return run


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    return value


BRIDGES = ("scib-metrics", "cz-benchmarks", "cell-eval", "cell-eval2", *PRESETS)  # of rules/bridges.smk and zoo.smk


# with several bases, pydantic puts the fields of the last one first
class CorpusConfig(ShardOptions, VocabularyOptions, PreprocessOptions):
    """Datasets that are preprocessed, counted and sharded together."""

    table: str = Field("config/datasets.tsv", description="Table of datasets.")
    datasets: Annotated[list[str], EachOnce] | None = None
    """Names of the rows to use; null uses all."""


class RunConfig(EvaluateOptions, KnockOutOptions, PredictOptions, ConsolidateOptions, PlanOptions):
    """One model, from plan to evaluation."""

    corpus: str = Field(description="Name of its corpus.")
    init_from: str | None = Field(None, pattern=NOT_WILDCARD)
    """Run whose exported model provides the initial weights; or the path of a model folder, with a `/`, such as
    ./pretrained; or hf://owner/name[@revision], on the Hugging Face hub; or geneformer:FOLDER or scgpt:FOLDER, with the
    published files of that model, which rule import reads. Sections model and tokens are those of a run or folder where
    those at the top of the file do not fit. For all but a run, evaluate does not know which cells the model was trained
    on."""
    trunk: str | None = None
    """Run from whose checkpoint at trunk_step this one continues: weights, optimizer, data position and curve. Its
    results equal a separate run from step 0, so all options except length and schedule must equal the trunk's, and the
    learning rates up to that step must be the same, as with schedule wsd or constant."""
    trunk_step: int | None = Field(None, ge=1)
    """Step of the trunk's checkpoint, which its train.keep_steps must list."""
    evaluate_steps: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field(default=[])
    """Steps of train.keep_steps whose checkpoints are also exported, embedded and evaluated, in
    `results/runs/NAME/steps/STEP`; the report plots the scores over steps. Changing it retrains nothing."""
    machine: str | None = None
    """Machine for its training: `set-resources: train.NAME` of the profile; null uses `train`. Changing it reruns
    nothing."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_together(self)
        if not_kept := sorted({*self.evaluate_steps} - {*self.train.keep_steps}):
            raise ValueError(f"evaluate_steps: {not_kept[0]} is not in train.keep_steps; add it there")
        task = self.evaluate.tasks.get("reconstruct")
        if isinstance(task, ReconstructConfig):
            changed = self.objective.model_dump() | task.objective
            validated(ObjectiveConfig, changed, ["evaluate.tasks.reconstruct.objective"])
        return self


class Workflow(Section):
    """config/config.yaml with all defaults and overrides applied."""

    report: Report
    corpora: dict[str, CorpusConfig] = Field(min_length=1)
    runs: dict[str, RunConfig] = Field(min_length=1)
    sweep: Mapping[str, Sweep] = Field(default_factory=dict)
    """Sweeps by name: a grid of runs over values of some options. Run names contain these values. `snakemake
    results/sweeps/NAME/results.csv` makes all runs of one."""
    private: bool = False
    """Make everything the workflow writes readable only by its user (umask 077); existing files stay as they are. Off:
    the umask of the shell. Changing it reruns nothing."""
    bridges: Mapping[str, str] = Field(default_factory=dict)
    """Python of an environment that has the package, by package, for use without conda (`--sdm conda`), for
    `results/runs/RUN/bridges/DATASET.scib-metrics.json`, `.cz-benchmarks.json`, `.cell-eval.json` or
    `.cell-eval2.json`; or by preset of `evaluate.external`, scvi or harmony. Changing it reruns nothing."""

    @field_validator("bridges", mode="before")
    @classmethod
    def _bridges_exist(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in BRIDGES:
                raise ValueError(f"no bridge {name!r}; {did_you_mean(name, BRIDGES)}")
        return value

    def problems(self) -> Iterator[str]:
        for name, run in self.runs.items():
            if run.corpus not in self.corpora:
                yield f"runs.{name}.corpus: no corpus {run.corpus!r}; there are: {', '.join(self.corpora)}"
            if run.tokens.needs_quantiles and not self.corpora[run.corpus].vocabulary.quantiles:
                yield (
                    f"runs.{name}.tokens: its bins are fitted to the corpus; set vocabulary.quantiles of corpus "
                    f"{run.corpus} to yes, or give tokens.edges"
                )
            if run.tokens.truncation == "variable" and not self.corpora[run.corpus].vocabulary.variability:
                yield (
                    f"runs.{name}.tokens.truncation: variable requires the order of genes by variability; set "
                    f"vocabulary.variability of corpus {run.corpus} to yes"
                )
            parents = [("init_from", run.init_from, "model folder"), ("objective.teacher", run.teacher, "folder")]
            for key, given, kind in parents:
                parent = given or "/"
                if parent not in self.runs and "/" not in parent and PublishedFolder.named_by(parent) is None:
                    yield (
                        f"runs.{name}.{key}: no run {parent!r}; there are: {', '.join(self.runs)}; the path of "
                        f"a {kind} has a `/`, such as ./NAME"
                    )
            self._refuse_circle([name])
            self._check_trunk(name, run)

    def _refuse_circle(self, chain: list[str]) -> None:
        """Refuse a run that waits for itself; `chain` are runs of which each waits for the next."""
        run = self.runs[chain[-1]]
        for key, parent in (("init_from", run.init_from), ("trunk", run.trunk), ("objective.teacher", run.teacher)):
            if parent in chain:
                raise ValueError(f"runs.{chain[0]}.{key}: a circle: {' -> '.join([*chain, parent])}")
            if parent in self.runs:
                self._refuse_circle([*chain, parent])

    def _check_trunk(self, name: str, run: RunConfig) -> None:
        """Refuse a trunk that is not a run, or that will not have the checkpoint."""
        if (run.trunk is None) != (run.trunk_step is None):
            raise ValueError(f"runs.{name}: expected trunk and trunk_step, got one of them; set both, or neither")
        if run.trunk is None:
            return
        if run.trunk not in self.runs:
            raise ValueError(f"runs.{name}.trunk: no run {run.trunk!r}; {did_you_mean(run.trunk, self.runs)}")
        trunk = self.runs[run.trunk]
        if run.trunk_step not in trunk.train.keep_steps:
            raise ValueError(
                f"runs.{name}.trunk_step: {run.trunk_step} is not in train.keep_steps of {run.trunk} "
                f"({trunk.train.keep_steps}); add it there"
            )
        if isinstance(trunk.train.steps, int) and trunk.train.steps < run.trunk_step:
            raise ValueError(
                f"runs.{name}.trunk_step: {run.trunk_step} is behind the last step of {run.trunk} ({trunk.train.steps})"
            )
        if isinstance(run.train.steps, int) and run.train.steps <= run.trunk_step:
            raise ValueError(
                f"runs.{name}.train.steps: expected more than its trunk_step, {run.trunk_step}, got {run.train.steps}"
            )
        for key in ("corpus", "init_from"):
            own, of_trunk = getattr(run, key), getattr(trunk, key)
            if own != of_trunk:
                raise ValueError(f"runs.{name}.{key}: expected {of_trunk}, as its trunk {run.trunk}, got {own}")

    def swept(self) -> dict[str, dict[str, dict[str, Any]]]:
        written = {name: sweep.model_dump() for name, sweep in self.sweep.items()}
        return expand(written, {})[1]

    def datasets(self, corpus: str) -> dict[str, Dataset]:
        """Every dataset of the corpus's table, including those the corpus does not train on."""
        return read_datasets(Path(self.corpora[corpus].table))

    def check_datasets(self, source: str) -> None:
        """Read every table. Raises ConfigError naming a dataset of `source` that its table does not have."""
        chosen = [(f"corpora.{name}", name, corpus.datasets) for name, corpus in self.corpora.items()]
        chosen += [(f"runs.{name}.evaluate", run.corpus, run.evaluate.datasets) for name, run in self.runs.items()]
        for where, corpus, names in chosen:
            known = self.datasets(corpus)
            for name in names or ():
                if name not in known:
                    raise ConfigError(
                        f"{source}: {where}.datasets: no dataset {name!r} in {self.corpora[corpus].table}; "
                        f"{did_you_mean(name, known)}"
                    )

        for name, run in self.runs.items():
            check_transfer(run.evaluate, self.evaluated_on(name), f"{source}: runs.{name}.evaluate")
            self._check_presets(source, name, run)
            self._check_obs_columns(source, name, run)

    def _check_presets(self, source: str, name: str, run: RunConfig) -> None:
        """Refuse a preset for a dataset that has no training cells, or no batches for harmony."""
        for external, model in run.evaluate.external.items():
            where = f"{source}: runs.{name}.evaluate.external.{external}: preset {model.preset}"
            for dataset in self.evaluated_on(name) if model.preset else ():
                if dataset not in self.trained_on(run.corpus):
                    raise ConfigError(
                        f"{where} is fitted on training cells, but corpus {run.corpus} has none of {dataset}; add it "
                        f"to corpora.{run.corpus}.datasets, or leave it out of evaluate.datasets"
                    )
                if model.preset == "harmony" and self.datasets(run.corpus)[dataset].batch is None:
                    table = self.corpora[run.corpus].table
                    raise ConfigError(f"{where} corrects batches; name those of {dataset} in column batch of {table}")

    def _check_obs_columns(self, source: str, name: str, run: RunConfig) -> None:
        """Refuse an obs column that a run reads and shards will not have: dropped by `keep_obs`."""
        kept = self.corpora[run.corpus].preprocess.keep_obs
        if kept is None:
            return
        rows = [self.datasets(run.corpus)[dataset] for dataset in self.trained_on(run.corpus)]
        own = {*(role for row in rows for role in row.roles), *(name for row in rows for name in row.label_names)}
        own |= {IS_CONTROL} if any(row.control for row in rows) else set()
        own |= {ORGANISM} if self.corpora[run.corpus].preprocess.organism_column else set()
        for column, option in (run.read_columns() | run.number_columns()).items():
            # shards have `dataset` too, and a column of that name as `dataset_original`
            if column not in {*kept, *own, "dataset", "dataset_original"}:
                known = ", ".join(["dataset", *kept, *sorted(own - {*kept})])
                raise ConfigError(
                    f"{source}: runs.{name}.{option}: no obs column {column!r}; preprocess.keep_obs keeps: {known}"
                )

    def trained_on(self, corpus: str) -> list[str]:
        """Names of the corpus's datasets, in the table's order."""
        chosen = self.corpora[corpus].datasets
        return [name for name in self.datasets(corpus) if chosen is None or name in chosen]

    def evaluated_on(self, run: str) -> list[str]:
        """Names of the datasets the run is evaluated on: `evaluate.datasets`, or its corpus's."""
        chosen = self.runs[run].evaluate.datasets
        return chosen if chosen is not None else self.trained_on(self.runs[run].corpus)

    def teacher_files(self, run: str) -> list[str]:
        """Embeddings of the datasets of the run's corpus by its teacher; none without one."""
        teacher = self.runs[run].teacher
        folder = Path(f"results/runs/{teacher}/embeddings" if teacher in self.runs else teacher or "")
        names = [] if teacher is None else self.trained_on(self.runs[run].corpus)
        return [str(folder / f"{name}.h5ad") for name in names]

    def entries(self, stage: str) -> Mapping[str, Section]:
        """Corpora or runs, whichever `stage` is run for; empty for a stage over all of them."""
        first = next(iter(OPTIONS[stage].model_fields))
        owners = [kind for kind, owner in entries_of(type(self)).items() if first in owner.model_fields]
        return getattr(self, owners[0]) if owners else {}

    def section(self, stage: str, name: str | None = None, dataset: Dataset | None = None) -> dict[str, Any]:
        """JSON-able {section: options} that `stage` reads, of the corpus or run `name`, or of a dataset."""
        owner = self.entries(stage).get(name or "", self)
        sections = {section: getattr(owner, section) for section in OPTIONS[stage].model_fields}
        if dataset is not None and "preprocess" in sections:
            sections["preprocess"] = dataset.preprocess(sections["preprocess"])
        return {section: options.model_dump(mode="json") for section, options in sections.items()}


def sections_of(owner: type[BaseModel]) -> dict[str, type[Section]]:
    """Sections of a corpus, a run or the whole workflow by name."""
    annotations = {name: field.annotation for name, field in owner.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


def keys_of(workflow: type[BaseModel] = Workflow) -> list[str]:
    """Keys of the whole workflow other than sections, corpora and runs."""
    others = {*sections_of(workflow), *entries_of(workflow)}
    return [name for name in workflow.model_fields if name not in others]


def entries_of(workflow: type[BaseModel] = Workflow) -> dict[str, type[Section]]:
    """The classes of a corpus and of a run, by the key that holds them."""
    return {
        name: part_of(field.annotation)
        for name, field in workflow.model_fields.items()
        if get_origin(field.annotation) is dict
    }
