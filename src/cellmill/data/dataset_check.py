"""Columns that the configuration names, looked for in the files of the table before anything runs.

Only names are read, and the categories of a control's column. Inputs whose names are not known without their data
(`declared_names`), and those that are not made yet, are left to stage preprocess, which checks all of it again before
it reads counts.
"""

from collections.abc import Iterable
from pathlib import Path

from cellmill.config.corpus import IS_CONTROL, ORGANISM, Dataset
from cellmill.config.label_map import read_label_map
from cellmill.config.workflow import CorpusConfig, Workflow
from cellmill.data.declared_names import DeclaredNames, declared_names
from cellmill.data.h5_probe import check_walk
from cellmill.data.mapped_labels import check_labels
from cellmill.data.obs_levels import DATASET, text_of
from cellmill.errors import ConfigError, DataError, did_you_mean


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
                if names is not None:  # otherwise stage preprocess says what it is
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
    for column, owner in dataset.asked_for.items():
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
