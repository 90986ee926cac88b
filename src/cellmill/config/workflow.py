"""The whole configuration: default sections, and corpora, runs and sweeps that override them.

`Workflow.section(stage, name)` is what a rule passes to its stage: only the options that stage
reads, so that a changed key reruns those stages and no others. A sweep is a set of runs, the
product of values of some options, with names made from the values.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from cellmill.config.checks import check_together
from cellmill.config.corpus import IS_CONTROL, NOT_WILDCARD, ORGANISM
from cellmill.config.datasets import Dataset, check_name, read_datasets
from cellmill.config.evaluate import PRESETS, check_transfer
from cellmill.config.options import (
    OPTIONS,
    AtlasOptions,
    ConsolidateOptions,
    EvaluateOptions,
    KnockOutOptions,
    MapOptions,
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
from cellmill.config.section import Counts, Names, Section
from cellmill.errors import ConfigError, did_you_mean

MAX_RUNS = 10_000
# columns of results.csv, next to the axes
_COLUMNS = set(
    "run parameters cells steps cells_seen gpu_hours cpu_core_hours dataset task name kind metric "
    "value sd".split()
)
# packages of rules/bridges.smk and zoo.smk
BRIDGES = ("scib-metrics", "cz-benchmarks", "cell-eval", "cell-eval2", *PRESETS)


class Sweep(Section):
    """Runs for all combinations of values of the options in `over`, with names such as
    `size-seed0-hidden128`.
    """

    run: dict[str, Any]
    """Shared by all its runs: `corpus`, and any key of a run."""
    over: dict[str, list[Any] | dict[str | int, dict[str, Any]]] = Field(min_length=1)
    """Values by option, such as `train.seed: [0, 1]`; or, under a name of your own, named points
    that set several options at once, such as `layout: {ddp: {parallel.strategy: ddp}, pp:
    {parallel.pp: 2}}`.
    """


def expand(
    sweeps: Any, taken: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """Runs of all sweeps, and the values of each by axis.

    Raise ConfigError, also for a name in `taken`.
    """
    runs: dict[str, Any] = {}
    values: dict[str, dict[str, dict[str, Any]]] = {}
    for name, sweep in mapping(sweeps, "sweep").items():
        where = f"sweep.{name}"
        over = mapping(mapping(sweep, where).get("over"), f"{where}.over")
        axes = {
            str(axis): _points(str(axis), given, f"{where}.over.{axis}")
            for axis, given in over.items()
        }
        taken_names = sorted(axes.keys() & _COLUMNS)
        if taken_names:
            raise ConfigError(
                f"{where}.over.{taken_names[0]}: is a column of results.csv; give the axis another name"
            )
        n = prod(map(len, axes.values()))
        if n > MAX_RUNS:
            raise ConfigError(
                f"{where}: {n:,} runs; leave out values, or make sweeps of at most {MAX_RUNS:,}"
            )
        for combination in product(*axes.values()):
            run = "-".join([str(name), *(label for label, _ in combination)])
            try:
                check_name(run)
            except ValueError as error:
                raise ConfigError(
                    f"{where}: {error}; name its values, as {{NAME: {{OPTION: VALUE}}}}"
                ) from None
            if run in runs or run in taken:
                raise ConfigError(
                    f"{where}: two runs are called {run}; give one of its values another name"
                )
            runs[run] = dict(mapping(sweep.get("run"), f"{where}.run"))
            for _, options in combination:
                for option, value in options.items():
                    *sections, key = str(option).split(".")
                    tree = runs[run]
                    for section in sections:
                        tree[section] = dict(
                            mapping(tree.get(section) or {}, f"{where}.run.{section}")
                        )
                        tree = tree[section]
                    tree[key] = value
            by_axis = {}
            for axis, (label, options) in zip(axes, combination):
                by_axis[axis] = _axis_value(axis, label, options)
            values.setdefault(name, {})[run] = by_axis
    return runs, values


def _points(axis: str, given: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Points of an axis: as each stands in the run's name, and its value by option."""
    if isinstance(given, dict) and given:
        return [
            (str(label), mapping(options, f"{where}.{label}")) for label, options in given.items()
        ]
    is_list = isinstance(given, list) and given
    if not is_list or any(isinstance(value, dict | list) for value in given):
        raise ConfigError(
            f"{where}: expected a list of values, or {{NAME: {{OPTION: VALUE}}}}, got {given!r}"
        )
    words = {"True": "yes", "False": "no", "None": "null"}  # by repr: 1 equals True
    option = axis.rsplit(".", 1)[-1]
    return [(f"{option}{words.get(repr(value), value)}", {axis: value}) for value in given]


def _axis_value(axis: str, label: str, options: dict[str, Any]) -> Any:
    """Value of an axis in tables and figures: its option's value, or the point's name."""
    value = options[axis] if list(options) == [axis] else None
    if list(options) != [axis] or isinstance(value, dict | list):
        return label
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML reads 3e-4 as text
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    return value


# with several bases, pydantic puts the fields of the last one first
class CorpusConfig(ShardOptions, VocabularyOptions, PreprocessOptions):
    """Datasets that are preprocessed, counted and sharded together."""

    table: str = "config/datasets.tsv"
    """Table of datasets."""
    datasets: Names | None = None
    """Names of the rows to use; null: all."""


class RunConfig(
    EvaluateOptions,
    KnockOutOptions,
    MapOptions,
    AtlasOptions,
    PredictOptions,
    ConsolidateOptions,
    PlanOptions,
):
    """One model, from plan to evaluation."""

    corpus: str
    """Name of its corpus."""
    init_from: str | None = Field(None, pattern=NOT_WILDCARD)
    """Model that provides the initial weights. It is the name of a run, the path of a model folder
    with a `/`, such as ./pretrained, or hf://owner/name[@revision] on the Hugging Face hub.
    geneformer:FOLDER or scgpt:FOLDER names a folder with published files, which rule import reads.
    Options of model and tokens that nobody wrote are its own; so are all of a section at the top of
    the file that does not fit it. evaluate knows which cells the model was trained on only if it is a run.
    """
    trunk: str | None = None
    """Run from whose checkpoint at trunk_step this run continues, with its weights, optimizer, data
    position and curve. The results equal those of a separate run from step 0. So all options except
    length and schedule must equal the trunk's, and the learning rates up to that step must be the
    same, as with schedule wsd or constant.
    """
    trunk_step: int | None = Field(None, ge=1)
    """Step of the trunk's checkpoint, one of its train.keep_steps."""
    evaluate_steps: Counts = Field(default=[])
    """Steps of train.keep_steps whose checkpoints are also exported, embedded and evaluated, in
    `results/runs/NAME/steps/STEP`; the report plots the scores over steps. Changing it retrains
    nothing.
    """
    machine: str | None = None
    """Machine for the training of this run: `set-resources: train.NAME` of the profile; null uses
    `train`. Changing it reruns nothing.
    """

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_together(self)
        not_kept = sorted({*self.evaluate_steps} - {*self.train.keep_steps})
        if not_kept:
            raise ValueError(
                f"evaluate_steps: {not_kept[0]} is not in train.keep_steps; add it there"
            )
        last = self.train.steps
        late = [step for step in self.evaluate_steps if isinstance(last, int) and step > last]
        if late:
            raise ValueError(
                f"evaluate_steps: {late[0]} is after the last step; remove it, or raise train.steps ({last})"
            )
        task = self.evaluate.tasks.get("reconstruct")
        if isinstance(task, ReconstructConfig):
            changed = self.objective.model_dump() | task.objective
            validated(ObjectiveConfig, changed, ["evaluate.tasks.reconstruct.objective"])
        return self


ENTRIES: dict[str, type[Section]] = {"corpora": CorpusConfig, "runs": RunConfig}


def sections_of(owner: type[BaseModel]) -> dict[str, type[Section]]:
    """Sections of a corpus, a run or the whole workflow by name."""
    sections = {}
    for name, field in owner.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            sections[name] = field.annotation
    return sections


def as_written(where: list[str], tree: dict[str, Any]) -> list[str]:
    """`where`, or the key at the top of the file that a run or corpus inherited the value from."""
    if len(where) > 2 and where[0] in ("corpora", "runs") and where[2] in tree:
        value: Any = tree[where[0]].get(where[1])
        for part in where[2:]:
            if not isinstance(value, dict) or part not in value:
                return where[2:]
            value = value[part]
    return where


class Workflow(Section):
    """config/config.yaml with all defaults and overrides applied."""

    report: Report
    corpora: dict[str, CorpusConfig] = Field(min_length=1)
    runs: dict[str, RunConfig] = Field(min_length=1)
    sweep: dict[str, Sweep] = Field({})
    """Grids of runs over values of some options, by name; `snakemake
    results/sweeps/NAME/results.csv` makes one.
    """
    private: bool = False
    """Make new files readable only by their user (umask 077). Off: the shell's umask. Changing it
    reruns nothing.
    """
    bridges: dict[str, str] = Field({})
    """Python of an environment that has the package, by package, for use without conda (`--sdm
    conda`), for `results/runs/RUN/bridges/DATASET.scib-metrics.json`, `.cz-benchmarks.json`,
    `.cell-eval.json` or `.cell-eval2.json`; or by preset of `evaluate.external`, scvi or harmony.
    Changing it reruns nothing.
    """
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)  # the file, before defaults
    _tables: dict[str, dict[str, Dataset]] = PrivateAttr(default_factory=dict)  # by path, once read

    def keep_written(self, tree: dict[str, Any]) -> None:
        """Keep the tree of the file, by which `as_written` names options."""
        self._written = tree

    def as_written(self, kind: str, name: str, option: str) -> str:
        """Option of an entry of `corpora` or `runs` (`kind`), as the file has it: at its top, if the
        entry inherits it.
        """
        return ".".join(as_written([kind, name, *option.split(".")], self._written))

    def problems(self) -> Iterator[str]:
        for name, corpus in self.corpora.items():
            if corpus.datasets == []:
                yield f"corpora.{name}.datasets: expected names of datasets, got none; null takes all"
        for name in self.bridges:
            if name not in BRIDGES:
                yield f"bridges: no bridge {name!r}; {did_you_mean(name, BRIDGES)}"
        for name, run in self.runs.items():
            if run.corpus not in self.corpora:
                yield f"runs.{name}.corpus: no corpus {run.corpus!r}; there are: {', '.join(self.corpora)}"
            vocabulary = self.corpora[run.corpus].vocabulary
            if run.tokens.needs_quantiles and not vocabulary.quantiles:
                yield f"runs.{name}.tokens: its bins are fitted to the corpus; set vocabulary.quantiles or tokens.edges"
            if run.tokens.truncation == "variable" and not vocabulary.variability:
                yield f"runs.{name}.tokens.truncation: variable requires vocabulary.variability; set it to yes"
            for key, parent in (("init_from", run.init_from), ("objective.teacher", run.teacher)):
                if not parent or parent in self.runs or "/" in parent:
                    continue
                if PublishedFolder.named_by(parent) is None:
                    hint = did_you_mean(parent, self.runs)
                    yield f"runs.{name}.{key}: no run {parent!r}; {hint}; a folder has a `/`, such as ./NAME"
            for problem in self._trunk_problems(run):
                yield f"runs.{name}{problem}"
        waits_for = {}
        for name, run in self.runs.items():
            waits_for[name] = {run.init_from, run.trunk, run.teacher} & {*self.runs}
        try:
            TopologicalSorter(waits_for).prepare()
        except CycleError as error:
            yield f"runs: init_from, trunk and objective.teacher are a circle: {' -> '.join(reversed(error.args[1]))}"

    def _trunk_problems(self, run: RunConfig) -> Iterator[str]:
        """Why a run cannot continue from its trunk, each after the run's name."""
        step = run.trunk_step
        if run.trunk is None or step is None:
            if run.trunk != step:
                yield ": expected trunk and trunk_step, got one of them; set both, or neither"
            return
        if run.trunk not in self.runs:
            yield f".trunk: no run {run.trunk!r}; {did_you_mean(run.trunk, self.runs)}"
        trunk = self.runs[run.trunk]
        kept = trunk.train.keep_steps
        last = trunk.train.steps
        if step not in kept:
            yield f".trunk_step: {step} is not in train.keep_steps of {run.trunk} ({kept}); add it there"
        if isinstance(last, int) and last < step:
            yield f".trunk_step: {step} is behind the last step of {run.trunk} ({last})"
        if isinstance(run.train.steps, int) and run.train.steps <= step:
            yield f".train.steps: expected more than its trunk_step, {step}, got {run.train.steps}"
        for key in ("corpus", "init_from"):
            value = getattr(run, key)
            expected = getattr(trunk, key)
            if value != expected:
                yield f".{key}: expected {expected}, as its trunk {run.trunk}, got {value}"

    def swept(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Values by axis of each run of each sweep."""
        return expand({name: sweep.model_dump() for name, sweep in self.sweep.items()}, {})[1]

    def datasets(self, corpus: str) -> dict[str, Dataset]:
        """Every dataset of the corpus's table, including those the corpus does not train on."""
        table = self.corpora[corpus].table
        if table not in self._tables:  # each run asks for it several times
            self._tables[table] = read_datasets(Path(table))
        return self._tables[table]

    def check_datasets(self, source: str) -> None:
        """Read every table. Raise ConfigError for options in `source` that do not fit the tables."""
        for problem in self._table_problems():
            raise ConfigError(f"{source}: {problem}")
        for name, run in self.runs.items():
            check_transfer(run.evaluate, self.evaluated_on(name), f"{source}: runs.{name}.evaluate")

    def _table_problems(self) -> Iterator[str]:
        for name, corpus in self.corpora.items():
            yield from self._unknown_datasets(f"corpora.{name}", name, corpus.datasets)
        for name, run in self.runs.items():
            where = f"runs.{name}.evaluate"
            yield from self._unknown_datasets(where, run.corpus, run.evaluate.datasets)
        for name, run in self.runs.items():
            yield from self._preset_problems(name, run)
            yield from self._obs_problems(name, run)

    def _unknown_datasets(self, where: str, corpus: str, names: list[str] | None) -> Iterator[str]:
        datasets = self.datasets(corpus)
        table = self.corpora[corpus].table
        for name in names or ():
            if name not in datasets:
                hint = did_you_mean(name, datasets)
                yield f"{where}.datasets: no dataset {name!r} in {table}; {hint}"

    def _preset_problems(self, name: str, run: RunConfig) -> Iterator[str]:
        """Datasets that a preset of `evaluate.external` cannot embed."""
        datasets = self.datasets(run.corpus)
        trained = self.trained_on(run.corpus)
        for external, model in run.evaluate.external.items():
            where = f"runs.{name}.evaluate.external.{external}: preset {model.preset}"
            for dataset in self.evaluated_on(name) if model.preset else ():
                if dataset not in trained:
                    yield f"{where} is fitted on training cells; add {dataset} to corpora.{run.corpus}.datasets"
                if model.preset == "harmony" and datasets[dataset].batch is None:
                    table = self.corpora[run.corpus].table
                    yield f"{where} corrects batches; name those of {dataset} in column batch of {table}"

    def _obs_problems(self, name: str, run: RunConfig) -> Iterator[str]:
        """obs columns that a run reads and preprocess does not keep."""
        preprocess = self.corpora[run.corpus].preprocess
        if preprocess.keep_obs is None:
            return
        datasets = self.datasets(run.corpus)
        added = set[str]()
        for dataset in self.trained_on(run.corpus):
            row = datasets[dataset]
            added |= {*row.roles, *row.label_names}
            if row.control:
                added.add(IS_CONTROL)
        if preprocess.organism_column:
            added.add(ORGANISM)
        kept = ["dataset", *preprocess.keep_obs, *sorted(added - {*preprocess.keep_obs})]
        for column, option in (run.read_columns() | run.number_columns()).items():
            # a column `dataset` of the file is in shards as `dataset_original`
            if column not in (*kept, "dataset_original"):
                yield f"runs.{name}.{option}: no obs column {column!r}; keep_obs keeps: {', '.join(kept)}"

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
        if teacher is None:
            return []
        folder = Path(f"results/runs/{teacher}/embeddings" if teacher in self.runs else teacher)
        names = self.trained_on(self.runs[run].corpus)
        return [str(folder / f"{name}.h5ad") for name in names]

    def entries(self, stage: str) -> Mapping[str, Section]:
        """Corpora or runs, whichever `stage` is run for; empty for a stage over all of them."""
        for kind, owner in ENTRIES.items():
            if issubclass(owner, OPTIONS[stage]):
                entries: Mapping[str, Section] = getattr(self, kind)
                return entries
        return {}

    def section(
        self, stage: str, name: str | None = None, dataset: Dataset | None = None
    ) -> dict[str, Any]:
        """JSON-able {section: options} that `stage` reads for a corpus or run `name`, or a dataset."""
        owner = self.entries(stage).get(name or "", self)
        sections = {section: getattr(owner, section) for section in OPTIONS[stage].model_fields}
        if dataset is not None and "preprocess" in sections:
            sections["preprocess"] = dataset.preprocess(sections["preprocess"])
        return {section: options.model_dump(mode="json") for section, options in sections.items()}
