"""Input files, options and arguments of the workflow's jobs by their wildcards, for workflow/rules."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from cellmill.config.corpus import SPLIT_OPTIONS
from cellmill.config.datasets import Dataset, ObsColumns, is_url
from cellmill.config.evaluate import ExternalModel
from cellmill.config.published import PublishedFolder, model_folder_of, vocabulary_file
from cellmill.config.workflow import Workflow
from cellmill.errors import ConfigError, did_you_mean, one_line
from cellmill.files import digest, write_json

SHOWN_CHANGES = 5  # options in a line about a stage that would run again
MAX_CHARACTERS = 40  # characters of a value in it
Wildcards = Any  # Snakemake's wildcards of a job, as attributes


def sized(base: int, mb_per_unit: float | None = None) -> Callable[..., int]:
    """Resource of a job: `base`, and 1 more for each `mb_per_unit` MB of input, times the attempt."""

    def resource(wildcards: Wildcards, input: Iterable[str], attempt: int) -> int:
        more = size_mb(input) / mb_per_unit if mb_per_unit else 0
        return int(base + more) * attempt

    return resource


def size_mb(input: Iterable[str]) -> float:
    """MB of input files.

    Snakemake's `input.size_mb` warns, is unknown in a dry run, and is nothing for folders and URLs.
    """
    return sum(map(_bytes_of, input)) / 2**20


def _bytes_of(path: str) -> int:
    """Bytes of an input; for a folder of its files, for a fetched URL of its copy."""
    if path.endswith(".fetched.json"):
        return int(json.loads(Path(path).read_text())["bytes"])
    if os.path.isdir(path):
        return sum(inner.stat().st_size for inner in Path(path).rglob("*") if inner.is_file())
    return os.path.getsize(path)


def values_by_path(tree: Any, path: str = "") -> dict[str, Any]:
    """Values of nested options by their keys joined with dots; an empty mapping is a value."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= values_by_path(value, f"{path}.{key}" if path else str(key))
    return values


def _shorten(value: Any) -> str:
    """A value of an option in few characters, as JSON."""
    text = json.dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


class JobFiles:
    """Files and arguments of jobs. A method of `wildcards` can be an input or a parameter of a rule."""

    def __init__(self, workflow: Workflow, writes: Callable[[], bool]) -> None:
        self.workflow = workflow
        self.corpora = workflow.corpora
        self.runs = workflow.runs
        # true if jobs run, so that files of options are written; known only after all rules
        self.writes = writes
        self._reported: set[Path] = set()  # files of options whose changes were printed
        # files of options by stage and by run or corpus, as they were at the first look
        self._written: dict[str, dict[str, list[Path]]] = {}
        self.datasets = {corpus: workflow.datasets(corpus) for corpus in workflow.corpora}
        self.swept = workflow.swept()
        models = [corpus.vocabulary.medians for corpus in self.corpora.values()]
        for run in self.runs.values():
            models.append(run.init_from)
            models += [external.model for external in run.evaluate.external.values()]
        folders = [PublishedFolder.named_by(model) for model in models if model is not None]
        self.published = {folder.name: folder for folder in folders if folder is not None}

    def check_targets(self, words: Iterable[str]) -> None:
        """Raise ConfigError if a target on the command line names an unknown run or corpus.

        Snakemake would miss a rule for the file.
        """
        known = {"runs": ("run", list(self.runs)), "corpora": ("corpus", list(self.corpora))}
        for word in words:
            match Path(word).parts:
                case ("results", "runs" | "corpora" as folder, name, _, *_):
                    kind, names = known[folder]
                    if name not in names:
                        raise ConfigError(
                            f"{word}: no {kind} {name!r}; {did_you_mean(name, names)}"
                        )

    # options

    def section(self, stage: str, wildcards: Wildcards) -> dict[str, Any]:
        """Sections of the configuration that `stage` reads, with a dataset's own options."""
        name = wildcards.get("run") or wildcards.get("corpus")
        dataset = self.dataset(wildcards) if stage == "preprocess" else None
        section = self.workflow.section(stage, name, dataset)
        if stage == "consolidate" and wildcards.at:
            section["consolidate"]["checkpoint"] = int(wildcards.at.rpartition("/")[2])
        return section

    def options(self, stage: str) -> Callable[[Wildcards], str]:
        """File of the options that `stage` reads, or of the values of a sweep.

        It is named after its content: other options rerun the stage.
        """

        @one_line()
        def file(wildcards: Wildcards) -> str:
            if stage == "sweep":
                tree = self.swept[wildcards.sweep]
            else:
                tree = self.section(stage, wildcards)
            owner = wildcards.get("run") or wildcards.get("corpus") or wildcards.get("sweep")
            prefix = f"{owner}." if owner else ""
            path = Path("results/options", stage, f"{prefix}{digest(tree)[:12]}.json")
            if not self.writes():
                self._report_changes(stage, owner, path, tree)
            elif not path.exists():
                try:
                    write_json(path, tree)
                except OSError as error:  # the first file that a workflow writes
                    problem = f"{error.filename or path}: {error.strerror}"
                    raise ConfigError(
                        f"{problem}; the workflow writes to its working directory"
                    ) from None
            return str(path)

        return file

    def _report_changes(
        self, stage: str, owner: str | None, path: Path, tree: dict[str, Any]
    ) -> None:
        """Print once which options differ from the stage's newest file.

        Snakemake would only name digests.
        """
        if stage not in self._written:  # a folder has a file or more for each run
            self._written[stage] = defaultdict(list)
            for file in path.parent.glob("*.json"):
                self._written[stage][file.stem.rpartition(".")[0]].append(file)
        written = self._written[stage].get(owner or "")
        if not written or path in written or path in self._reported:
            return
        self._reported.add(path)
        before = values_by_path(json.loads(max(written, key=os.path.getmtime).read_text()))
        now = values_by_path(tree)
        changes = []
        for key in before | now:
            if before.get(key) != now.get(key):
                changes.append(f"{key} {_shorten(before.get(key))} -> {_shorten(now.get(key))}")
        text = ", ".join(changes[:SHOWN_CHANGES])
        if len(changes) > SHOWN_CHANGES:
            text += f" and {len(changes) - SHOWN_CHANGES} more"
        if stage == "train":
            text += "; `cellmill check` says whether the training refuses this"
        whose = f" of {owner}" if owner else ""
        print(f"cellmill: {stage}{whose}: {text}", file=sys.stderr)

    def of_sweep(self, pattern: str) -> Callable[[Wildcards], list[str]]:
        return lambda wildcards: [pattern.format(run=run) for run in self.swept[wildcards.sweep]]

    # corpora

    @one_line()
    def dataset(self, wildcards: Wildcards) -> Dataset:
        datasets = self.datasets[wildcards.corpus]
        name = wildcards.dataset
        if name not in datasets:
            table = self.corpora[wildcards.corpus].table
            raise ConfigError(f"{table}: no dataset {name!r}; {did_you_mean(name, datasets)}")
        return datasets[name]

    def raw(self, wildcards: Wildcards) -> str:
        """Path of the dataset, or the record of its copy if it is a URL."""
        path = self.dataset(wildcards).path
        fetched = f"results/corpora/{wildcards.corpus}/inputs/{wildcards.dataset}.fetched.json"
        return fetched if is_url(path) else path

    def columns(self, wildcards: Wildcards) -> list[str]:
        """Columns of the table about a dataset's obs and counts, as arguments of preprocess."""
        dataset = self.dataset(wildcards)
        words = []
        for name in ObsColumns.model_fields:
            value = getattr(dataset, name)
            if value is not None:
                words.append(f"--{name.replace('_', '-')}={value}")
        if dataset.counts_rule != "refuse":
            words.append(f"--counts-rule={dataset.counts_rule}")
        if dataset.gene_column is not None:
            words.append(f"--gene-column={dataset.gene_column}")
        return words

    def vocabulary_options(self, wildcards: Wildcards) -> str | list[str]:
        """File of the options of stage vocabulary, and the split if only training cells are read.

        In one parameter, so that vocabularies of all cells, as earlier versions made them, are not
        made again.
        """
        file = self.options("vocabulary")(wildcards)
        corpus = self.corpora[wildcards.corpus]
        if not corpus.vocabulary.reads_split(corpus.shard):
            return file
        split = corpus.shard.model_dump(mode="json", include={*SPLIT_OPTIONS})
        return [file, f"--split={json.dumps(split, sort_keys=True)}"]

    def label_maps(self, wildcards: Wildcards) -> list[str]:
        return list(dict.fromkeys(self.dataset(wildcards).label_maps.values()))

    def option_file(self, section: str, key: str) -> Callable[[Wildcards], list[str]]:
        """The file that an option of the corpus names, if any; the vocabulary of a published model."""

        def files(wildcards: Wildcards) -> list[str]:
            path = getattr(getattr(self.corpora[wildcards.corpus], section), key)
            return [] if path is None else [vocabulary_file(path)]

        return files

    def cells(self, wildcards: Wildcards) -> list[str]:
        """Preprocessed cells of every dataset of the corpus."""
        names = self.workflow.trained_on(wildcards.corpus)
        return [f"results/corpora/{wildcards.corpus}/cells/{name}.h5ad" for name in names]

    def parts(self, wildcards: Wildcards) -> list[str]:
        """Parts of the shards that jobs of their own write; none if one job writes all."""
        jobs = self.corpora[wildcards.corpus].shard.jobs
        if jobs == 1:
            return []
        folder = f"results/corpora/{wildcards.corpus}/shards/parts"
        return [f"{folder}/{number}-of-{jobs}.json" for number in range(1, jobs + 1)]

    def reported_corpora(self) -> list[str]:
        """Corpora used by any run, in the order of the configuration."""
        used = {run.corpus for run in self.runs.values()}
        return [corpus for corpus in self.corpora if corpus in used]

    def quality_reports(self) -> list[str]:
        """Reports on quality control of the datasets that runs are trained or evaluated on."""
        reports: dict[str, None] = {}  # in order, each once
        for name, run in self.runs.items():
            trained = self.workflow.trained_on(run.corpus)
            for dataset in [*trained, *self.workflow.evaluated_on(name)]:
                reports[f"results/corpora/{run.corpus}/cells/{dataset}.json"] = None
        return list(reports)

    # runs

    def of_corpus(self, pattern: str) -> Callable[[Wildcards], str]:
        return lambda wildcards: pattern.format(corpus=self._corpus(wildcards), **wildcards)

    def _corpus(self, wildcards: Wildcards) -> str:
        return f"results/corpora/{self.runs[wildcards.run].corpus}"

    @one_line()
    def published_files(self, wildcards: Wildcards) -> list[str]:
        """Files of a published folder that rule `import` reads."""
        return [str(path) for path in self.published[wildcards.published].files()]

    def _parents(self, wildcards: Wildcards) -> list[tuple[str, list[str]]]:
        """Files that a training reads of other runs, each with its arguments of `cellmill train`."""
        run = self.runs[wildcards.run]
        parents = []
        if run.init_from is not None:
            folder = f"results/runs/{run.init_from}/model"
            if run.init_from not in self.runs:
                folder = model_folder_of(run.init_from)
            parents.append((f"{folder}/model.safetensors", ["--init-from", folder]))
        if run.trunk is not None:
            train = f"results/runs/{run.trunk}/train"
            checkpoint = f"{train}/checkpoints/step-{run.trunk_step:08}"
            parents.append((f"{train}/status.json", ["--trunk", checkpoint]))
        if run.teacher is not None:
            folder = f"results/runs/{wildcards.run}/teacher"
            parents.append((f"{folder}/vectors.json", ["--teacher", folder]))
        return parents

    def parents(self, wildcards: Wildcards) -> list[str]:
        files = [file for file, _ in self._parents(wildcards)]
        # its path is among the options
        vectors = getattr(self.runs[wildcards.run].model, "gene_vectors", None)
        return files if vectors is None else [*files, vectors]

    def parent_arguments(self, wildcards: Wildcards) -> list[str]:
        return [*chain.from_iterable(words for _, words in self._parents(wildcards))]

    def ancestor_manifests(self, wildcards: Wildcards) -> list[str]:
        """Manifests of the runs that the run began with or learnt from.

        Their cells are not held out either.
        """
        manifests = []
        runs = [self.runs[wildcards.run]]
        while runs:
            run = runs.pop(0)
            # a parent may also be None, or the path of a folder
            parents = [name for name in (run.init_from, run.teacher) if name in self.runs]
            runs += [self.runs[name] for name in parents]
            corpora = [self.runs[name].corpus for name in parents]
            manifests += [f"results/corpora/{corpus}/shards/manifest.json" for corpus in corpora]
        return manifests

    # evaluation

    def evaluated(self, pattern: str) -> Callable[[Wildcards], list[str]]:
        return lambda wildcards: [
            pattern.format(corpus=self._corpus(wildcards), dataset=name, **wildcards)
            for name in self.workflow.evaluated_on(wildcards.run)
        ]

    def atlas_embeddings(self, wildcards: Wildcards) -> list[str]:
        """Embeddings of the datasets of the run's corpus."""
        names = self.workflow.trained_on(self.runs[wildcards.run].corpus)
        return [f"results/runs/{wildcards.run}/embeddings/{name}.h5ad" for name in names]

    def atlas_labels(self, wildcards: Wildcards) -> list[str]:
        """obs column of the first label of each of these datasets; '-' for none."""
        corpus = self.runs[wildcards.run].corpus
        datasets = [self.datasets[corpus][name] for name in self.workflow.trained_on(corpus)]
        return [next(iter(dataset.label_names), "-") for dataset in datasets]

    def evaluated_steps(self) -> list[str]:
        files = []
        for name, run in self.runs.items():
            for step in run.evaluate_steps:
                files.append(f"results/runs/{name}/steps/{step}/evaluate/metrics.json")
        return files

    def label_columns(self, wildcards: Wildcards) -> list[str]:
        """obs columns of the labels for each dataset the run is evaluated on; '-' for none."""
        names = self.workflow.evaluated_on(wildcards.run)
        return [self._join_labels(wildcards.run, name) for name in names]

    def bridged_label_columns(self, wildcards: Wildcards) -> str:
        """obs columns of the labels of a dataset; '-' for none."""
        return self._join_labels(wildcards.run, wildcards.dataset)

    def _join_labels(self, run: str, dataset: str) -> str:
        corpus = self.runs[run].corpus
        return "|".join(self.datasets[corpus][dataset].label_names) or "-"

    def task_files(self, wildcards: Wildcards) -> list[str]:
        """Files that the options of the run's evaluation tasks name."""
        tasks = self.runs[wildcards.run].evaluate.tasks.values()
        return [*chain.from_iterable(task.paths().values() for task in tasks)]

    def external_embeddings(self, wildcards: Wildcards) -> list[str]:
        """Embeddings by the models of `evaluate.external` of the first dataset, then of the next."""
        corpus = self._corpus(wildcards)
        models = self.runs[wildcards.run].evaluate.external.items()
        files = []
        for dataset in self.workflow.evaluated_on(wildcards.run):
            for name, model in models:
                if model.preset:
                    files.append(f"{corpus}/zoo/{model.preset}/{dataset}.h5ad")
                else:
                    digest = model.digest[:12]
                    files.append(f"{corpus}/external/{name}/{dataset}-{digest}.h5ad")
        return files

    @one_line()
    def external_model(self, wildcards: Wildcards) -> ExternalModel:
        """The options of an external model, by its name and digest."""
        for run in self.runs.values():
            model = run.evaluate.external.get(wildcards.external)
            if model is not None and model.digest.startswith(wildcards.digest):
                return model
        raise ConfigError(
            f"no run has an evaluate.external.{wildcards.external} of digest {wildcards.digest}"
        )

    # bridges

    def bridged(self, pattern: str) -> Callable[[Wildcards], str]:
        """`pattern`, if the run is evaluated on the dataset."""

        @one_line()
        def file(wildcards: Wildcards) -> str:
            evaluated = self.workflow.evaluated_on(wildcards.run)
            name = wildcards.dataset
            if name not in evaluated:
                hint = did_you_mean(name, evaluated)
                raise ConfigError(
                    f"run {wildcards.run} is not evaluated on dataset {name!r}; {hint}"
                )
            return pattern.format(corpus=self._corpus(wildcards), **wildcards)

        return file

    @one_line()
    def bridge_label(self, wildcards: Wildcards) -> str:
        """obs column of the first label of a dataset."""
        corpus = self.runs[wildcards.run].corpus
        labels = self.datasets[corpus][wildcards.dataset].label_names
        if not labels:
            table = self.corpora[corpus].table
            raise ConfigError(
                f"{table}: dataset {wildcards.dataset} has no label, which bridges read; name an obs column in label"
            )
        return labels[0]

    def bridge_python(self, package: str) -> str:
        """Interpreter of a bridge or preset: `bridges` of the configuration, or the environment's."""
        return self.workflow.bridges.get(package, "python")
