"""Checks before anything runs: the files, packages and obs columns that the configuration names.

Only names are read, and the categories of a control's column. Inputs whose names cannot be read without their data
(`declared_names`) and inputs that do not exist yet are left to stage preprocess, which repeats all checks before it
reads counts. Files are checked here because Snakemake accepts an output whose input is missing, without a message: a
mistyped path would keep the results of the file named before.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from cellmill.config.corpus import IS_CONTROL, ORGANISM
from cellmill.config.datasets import Dataset, is_url, read_label_map
from cellmill.config.workflow import CorpusConfig, Workflow
from cellmill.data.inputs.formats import DeclaredNames, declared_names
from cellmill.data.inputs.h5_walk import check_walk
from cellmill.data.prepare.obs import check_labels
from cellmill.data.shards.index import DATASET, text_of
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.files import read_json, special_kind


def check_datasets(pipeline: Workflow) -> None:
    """Raise ConfigError or DataError for the first column that no file has, of all datasets that the workflow reads."""
    tables = {name: pipeline.datasets(name) for name in pipeline.corpora}
    check_walk(Path(table[dataset].path) for name, table in tables.items() for dataset in read_by_runs(pipeline, name))
    for name, corpus in pipeline.corpora.items():
        table = tables[name]
        columns: dict[str, set[str]] = {}
        for dataset in read_by_runs(pipeline, name):
            for label_map in map(Path, table[dataset].label_maps.values()):
                if label_map.is_file():  # a missing one is named once rules are known that may make it
                    read_label_map(label_map)
            with declared_names(Path(table[dataset].path)) as names:
                if names is not None:  # otherwise stage preprocess checks it
                    columns[dataset] = _check_names(names, corpus.table, table[dataset], corpus)
        trained = [columns[dataset] for dataset in pipeline.trained_on(name) if dataset in columns]
        if len(trained) == len(pipeline.trained_on(name)):
            _check_options(pipeline, name, trained)


def read_by_runs(pipeline: Workflow, corpus: str) -> list[str]:
    """Datasets on which a corpus or one of its runs is trained or evaluated."""
    runs = [run for run, options in pipeline.runs.items() if options.corpus == corpus]
    evaluated = [dataset for run in runs for dataset in pipeline.evaluated_on(run)]
    return list(dict.fromkeys([*pipeline.trained_on(corpus), *evaluated]))


def _check_names(names: DeclaredNames, table: str, dataset: Dataset, corpus: CorpusConfig) -> set[str]:
    """Check one input, and return the obs columns that its preprocessed cells will have."""
    path, known = Path(dataset.path), names.columns
    where = f"{table}: dataset {dataset.dataset}: {path}"
    if (repeated := names.repeated_name()) is not None:
        name, n, others = repeated
        more = f" and {others:,} more repeat" if others else ""
        raise DataError(
            f"{where}: obs names are not unique: {name!r} occurs {n:,} times{more}; call obs_names_make_unique() and "
            "write the file again"
        )
    if dataset.counts not in names.counts:
        raise DataError(
            f"{where} has no matrix {dataset.counts!r} (counts); {did_you_mean(dataset.counts, names.counts)}"
        )
    for column, owner in dataset.read_columns.items():
        if column not in known:
            raise DataError(f"{where} has no obs column {column!r} ({owner}); {did_you_mean(column, known)}")
    kept = corpus.preprocess.keep_obs
    for column in kept or ():
        if column not in known:
            raise DataError(f"{path}: no obs column {column!r} (preprocess.keep_obs); {did_you_mean(column, known)}")
    if dataset.control is not None and dataset.controlled is not None:
        _check_control(where, names, dataset.roles[dataset.controlled], dataset.control)
    labels = dict(zip(dataset.label_names, dataset.labels))
    for name, label_map in dataset.label_maps.items():
        if Path(label_map).is_file() and (categories := names.categories_of(labels[name])) is not None:
            check_labels(Path(label_map), map(text_of, categories), path, labels[name])
    made = {*dataset.roles, *({IS_CONTROL} if dataset.control else ())}
    made |= {ORGANISM} if corpus.preprocess.organism_column else set()
    own = {*known} if kept is None else {*kept}
    renamed = {f"{role}_original" for role in made & own if dataset.roles.get(role) != role}
    renamed |= {
        f"{name}_original" for name in labels.keys() & own if labels[name] != name or name in dataset.label_maps
    }
    return own | made | renamed | labels.keys()


def _check_control(where: str, names: DeclaredNames, column: str, control: str) -> None:
    categories = names.categories_of(column)
    if categories is not None and control not in (values := [str(value) for value in categories]):
        raise DataError(
            f"{where} has no {control!r} (control) in obs column {column!r}; {did_you_mean(control, values)}"
        )


def _check_options(pipeline: Workflow, name: str, columns: list[set[str]]) -> None:
    """Refuse a split or a run of corpus `name` by an obs column that its shards will not have."""
    split_by = pipeline.corpora[name].shard.split_by
    every, some = {DATASET} | set.intersection(*columns), {DATASET, f"{DATASET}_original"} | set.union(*columns)
    if split_by is not None and split_by not in every:
        raise ConfigError(
            f"corpora.{name}.shard.split_by: not all datasets have an obs column {split_by!r}; "
            f"{did_you_mean(split_by, sorted(every))}"
        )
    for run, options in pipeline.runs.items():
        if options.corpus == name:
            _check_run(f"runs.{run}", options.obs_columns() | options.number_columns(), some)


def _check_run(run: str, read: dict[str, str], known: Iterable[str]) -> None:
    for column, option in read.items():
        if column not in known:
            raise ConfigError(
                f"{run}.{option}: no dataset of its corpus has an obs column {column!r}; "
                f"{did_you_mean(column, sorted(known))}"
            )


CELLS = "results/corpora/{corpus}/cells/{dataset}.h5ad"
_SHOWN = 3  # missing datasets that a warning names


def check_inputs(pipeline: Workflow, is_made: Callable[[str], bool] = lambda path: False) -> str | None:
    """Look for each file that options and tables name, and that no rule makes (`is_made` of a path).

    Returns a line on datasets that are gone since their cells were made, which is fine, or None. Raises ConfigError or
    DataError for a file that is missing, a FIFO, a socket or a device, or a package that is not installed.
    """
    _check_packages(pipeline)
    for option, text in _files_of_options(pipeline):
        if not is_made(text) and not Path(text).is_file():
            kind = special_kind(Path(text)) or ("folder" if Path(text).is_dir() else None)
            raise ConfigError(
                f"{option}: {text}: " + ("no such file" if kind is None else f"expected a file, got a {kind}")
            )
    gone = [cells for name in pipeline.corpora for cells in _gone(pipeline, name, is_made)]
    if not gone:
        return None
    more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
    return f"used as they are, since their inputs are gone: {', '.join(gone[:_SHOWN])}{more}"


def _check_packages(pipeline: Workflow) -> None:
    """Raise ConfigError for a package that a stage of the workflow imports and that this Python does not have."""
    for option, module, extra in _packages(pipeline):
        if find_spec(module) is None:
            raise ConfigError(f"{option} requires {module}, which is missing: pip install 'cellmill[{extra}]'")


def _packages(pipeline: Workflow) -> Iterator[tuple[str, str, str]]:
    """Option, module and extra of cellmill."""
    for name, corpus in pipeline.corpora.items():
        if corpus.vocabulary.select == "seurat_v3":
            yield f"corpora.{name}.vocabulary.select seurat_v3", "skmisc", "hvg"
    for name, run in pipeline.runs.items():
        for task in run.evaluate.tasks.values():
            for module, extra in task.packages().items():
                yield f"runs.{name}.evaluate.tasks.{task.name}", module, extra


def _files_of_options(pipeline: Workflow) -> Iterator[tuple[str, str]]:
    """Option and path of every file but the datasets of tables."""
    for name, corpus in pipeline.corpora.items():
        table = pipeline.datasets(name)
        for dataset in read_by_runs(pipeline, name):
            for label_map in table[dataset].label_maps.values():
                yield f"{corpus.table}: dataset {dataset}: label_map", label_map
        for section, key in (("preprocess", "orthologs"), ("vocabulary", "genes")):
            if (path := getattr(getattr(corpus, section), key)) is not None:
                yield f"corpora.{name}.{section}.{key}", path
    for name, run in pipeline.runs.items():
        if (path := getattr(run.model, "gene_vectors", None)) is not None:
            yield f"runs.{name}.model.gene_vectors", path
        for task in run.evaluate.tasks.values():
            for option, path in task.paths().items():
                yield f"runs.{name}.evaluate.tasks.{task.name}.{option}", path
        for external, model in run.evaluate.external.items():
            yield from ((f"runs.{name}.evaluate.external.{external}.files", path) for path in model.files)
        parent = run.init_from
        if parent is not None and parent not in pipeline.runs and not is_url(parent):
            yield f"runs.{name}.init_from", str(Path(parent) / "model.safetensors")


def _gone(pipeline: Workflow, corpus: str, is_made: Callable[[str], bool]) -> Iterator[str]:
    """Preprocessed cells of the datasets whose input is missing. Raises DataError if there are none, or not of it."""
    table = pipeline.datasets(corpus)
    for name in read_by_runs(pipeline, corpus):
        text = table[name].path
        where = f"{pipeline.corpora[corpus].table}: dataset {name}: {text}"
        if is_url(text) or is_made(text):
            continue
        if (kind := special_kind(Path(text))) is not None:  # opening a FIFO would wait without end
            raise DataError(f"{where}: expected a file or folder, got a {kind}")
        cells = Path(CELLS.format(corpus=corpus, dataset=name))
        if Path(text).exists():
            continue
        if not cells.exists():  # Snakemake names it only if no later output stands, such as the report of other runs
            command = source if (source := table[name].source or "").startswith("cellmill ") else None
            advice = f"make it: {command}" if command else "correct the path, or put the file there"
            raise DataError(f"{where}: no such file; {advice}")
        made_of = (
            read_json(cells.with_suffix(".json"))["source"]["file"] if cells.with_suffix(".json").exists() else None
        )
        if made_of != Path(text).name:
            raise DataError(
                f"{where}: no such file, and {cells} is of {made_of}; correct the path, or delete the cells"
            )
        yield str(cells)
