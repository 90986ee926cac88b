"""Checks before anything runs: the files, packages and obs columns that the configuration names.

Only names are read, and the categories of a control's column; the rest is left to stage preprocess,
which repeats all checks before it reads counts. Files are checked here because Snakemake accepts an
output whose input is missing, without a message: a mistyped path would keep the results of the file
named before.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from cellmill.config.corpus import DATASET, IS_CONTROL, ROLES
from cellmill.config.datasets import Dataset, is_url
from cellmill.config.published import HUB_MODEL, PublishedFolder
from cellmill.config.workflow import CorpusConfig, Workflow
from cellmill.data.arrays import as_text
from cellmill.data.inputs.derived.grouped import MODES
from cellmill.data.inputs.derived.recovered import matrix_to_recover
from cellmill.data.inputs.formats import DeclaredNames, declared_names
from cellmill.data.inputs.h5_walk import check_walk
from cellmill.data.prepare.label_maps import check_labels, read_label_map
from cellmill.data.prepare.obs import name_columns
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError, require_known
from cellmill.files import read_json, require_file, special_kind

CELLS = "results/corpora/{corpus}/cells/{dataset}.h5ad"
_SHOWN = 3  # datasets that a line names
Roles = dict[tuple[str, str], set[str]]
"""Roles of obs columns by corpus and dataset."""


def check_datasets(pipeline: Workflow) -> None:
    """Raise ConfigError or DataError for the first column that a dataset of the workflow lacks."""
    rows: dict[str, dict[str, Dataset]] = {}  # by corpus and dataset
    for name in pipeline.corpora:
        table = pipeline.datasets(name)
        rows[name] = {dataset: table[dataset] for dataset in read_by_runs(pipeline, name)}
    check_walk(Path(row.path) for table in rows.values() for row in table.values())
    for name, corpus in pipeline.corpora.items():
        columns: dict[str, set[str]] = {}
        for dataset, row in rows[name].items():
            for label_map in map(Path, row.label_maps.values()):
                # a missing map is named once rules are known that may make it
                if label_map.is_file():
                    read_label_map(label_map)
            with declared_names(Path(row.path)) as names:
                if names is not None:  # otherwise stage preprocess checks it
                    columns[dataset] = _check_names(names, corpus.table, row, corpus)
        trained = [columns[dataset] for dataset in pipeline.trained_on(name) if dataset in columns]
        if len(trained) == len(pipeline.trained_on(name)):
            _check_options(pipeline, name, trained)


def read_by_runs(pipeline: Workflow, corpus: str) -> list[str]:
    """Datasets on which a corpus or one of its runs is trained or evaluated."""
    runs = [run for run, options in pipeline.runs.items() if options.corpus == corpus]
    evaluated = chain.from_iterable(map(pipeline.evaluated_on, runs))
    return list(dict.fromkeys([*pipeline.trained_on(corpus), *evaluated]))


def _check_names(
    names: DeclaredNames, table: str, dataset: Dataset, corpus: CorpusConfig
) -> set[str]:
    """Check one input, and return the obs columns that its preprocessed cells will have."""
    path = Path(dataset.path)
    known = names.columns
    kept = corpus.preprocess.keep_obs
    where = f"{table}: dataset {dataset.dataset}: {path}"
    matrix = matrix_to_recover(dataset.counts) or dataset.counts
    if matrix not in MODES:  # columns of a matrix, which stage preprocess looks for
        require_known(matrix, names.counts, f"{where} has no matrix {matrix!r} (counts)")
    for column, owner in dataset.read_columns.items():
        require_known(column, known, f"{where} has no obs column {column!r} ({owner})")
    for column in kept or ():
        require_known(column, known, f"{path}: no obs column {column!r} (preprocess.keep_obs)")
    if dataset.control is not None and dataset.controlled is not None:
        column = dataset.roles[dataset.controlled]
        values = [*map(as_text, names.categories_of(column) or ())]
        for control in dataset.controls_in(values) if values else ():
            fault = f"{where} has no {control!r} (control) in obs column {column!r}"
            if control != "nan":  # the cells without a value
                require_known(control, values, fault)
    labels = dict(zip(dataset.label_names, dataset.labels))
    for name, label_map in dataset.label_maps.items():
        categories = names.categories_of(labels[name])
        if categories is not None and Path(label_map).is_file():
            check_labels(Path(label_map), map(as_text, categories), path, labels[name])
    columns = name_columns(known, kept, dataset, corpus.preprocess.organism_column)
    return {*columns.kept, *columns.roles, *columns.labels, *columns.originals.values()}


def _check_options(pipeline: Workflow, name: str, columns: list[set[str]]) -> None:
    """Refuse a split or a run of corpus `name` by an obs column that its shards will not have."""
    split_by = pipeline.corpora[name].shard.split_by
    if split_by is not None:
        in_all = {DATASET} | set.intersection(*columns)
        option = pipeline.as_written("corpora", name, "shard.split_by")
        fault = f"{option}: not all datasets have an obs column {split_by!r}"
        require_known(split_by, sorted(in_all), fault)
    in_any = {DATASET, f"{DATASET}_original"} | set.union(*columns)
    for run, options in pipeline.runs.items():
        if options.corpus != name:
            continue
        for column, key in (options.obs_columns() | options.number_columns()).items():
            option = pipeline.as_written("runs", run, key)
            fault = f"{option}: no dataset of its corpus has an obs column {column!r}"
            require_known(column, sorted(in_any), fault)


def check_inputs(
    pipeline: Workflow, is_made: Callable[[str], bool] = lambda path: False
) -> list[str]:
    """Look for each file that options and tables name, unless a rule makes it (`is_made` of a path).

    Returns lines on what is allowed: datasets that are gone since their cells were made, and tasks
    that will be skipped. Raises ConfigError or DataError for a file that is missing, a FIFO, a
    socket or a device, or a package that is not installed.
    """
    packages = []  # option, module and extra
    for name, corpus in pipeline.corpora.items():
        if corpus.vocabulary.select == "seurat_v3":
            select = pipeline.as_written("corpora", name, "vocabulary.select")
            packages.append((f"{select} seurat_v3", "skmisc", "hvg"))
    for name, run in pipeline.runs.items():
        for task in run.evaluate.tasks.values():
            option = pipeline.as_written("runs", name, f"evaluate.tasks.{task.name}")
            packages += [(option, module, extra) for module, extra in task.packages().items()]
    for option, module, extra in packages:
        if find_spec(module) is None:
            raise ConfigError(
                f"{option} requires {module}, which is missing: pip install 'cellmill[{extra}]'"
            )
    for option, text in _files_of_options(pipeline):
        if is_made(text):
            continue
        path = Path(text)
        try:
            require_file(path)
        except DataError as error:
            raise ConfigError(f"{option}: {error}") from None
        # cellmill only passes on the files of another package's model, so these may be empty
        if path.stat().st_size == 0 and not option.endswith(".files"):
            raise ConfigError(f"{option}: {text}: the file is empty")
    gone: list[str] = []
    for name in pipeline.corpora:
        gone += _gone(pipeline, name, is_made)
    lines = (
        [f"used as they are, since their inputs are gone: {list_first(gone, _SHOWN)}"]
        if gone
        else []
    )
    roles: Roles = {}
    for name in pipeline.runs:
        lines += _skipped_tasks(pipeline, name, roles)
    return list(dict.fromkeys(lines))


def _skipped_tasks(pipeline: Workflow, name: str, roles: Roles) -> Iterator[str]:
    """Lines on tasks of a run for which datasets have no label, batch or other column.

    Each file is opened once for all runs: `roles` keeps what its cells have.
    """
    run = pipeline.runs[name]
    table = pipeline.datasets(run.corpus)
    corpus = pipeline.corpora[run.corpus]
    datasets: dict[tuple[str, str], list[str]] = {}  # by column and tasks
    for dataset in pipeline.evaluated_on(name):
        key = (run.corpus, dataset)
        if key not in roles:
            roles[key] = _roles_of(table[dataset], corpus.preprocess.keep_obs)
        tasks: dict[str, list[str]] = {}
        for task, options in run.evaluate.tasks.items():
            missing = options.missing_role(roles[key])
            if missing is not None:
                tasks.setdefault(missing, []).append(task)
        for column, without in tasks.items():
            datasets.setdefault((column, ", ".join(without)), []).append(dataset)
    for (column, skipped), lacking in datasets.items():
        fill = f"fill column {column} of {corpus.table}"
        yield f"{list_first(lacking, _SHOWN)}: no {column}, so {skipped} will be skipped; {fill}"


def _roles_of(dataset: Dataset, keep_obs: list[str] | None) -> set[str]:
    """Roles that the preprocessed cells of a dataset will have, and label and control.

    obs columns with the name of a role count too. Without knowledge of them, every role does.
    """
    roles = {*dataset.roles}
    if dataset.labels:
        roles.add("label")
    if dataset.control is not None:
        roles.add("control")
    with declared_names(Path(dataset.path)) as names:
        if names is None:
            return roles | {*ROLES, "control"}
        columns = {*names.columns} if keep_obs is None else {*names.columns} & {*keep_obs}
    if IS_CONTROL in columns:
        roles.add("control")
    return roles | (columns & {*ROLES})


def _files_of_options(pipeline: Workflow) -> Iterator[tuple[str, str]]:
    """Option and path of every file, except the datasets of tables."""
    for name, corpus in pipeline.corpora.items():
        option = partial(pipeline.as_written, "corpora", name)
        table = pipeline.datasets(name)
        for dataset in read_by_runs(pipeline, name):
            for label_map in table[dataset].label_maps.values():
                yield f"{corpus.table}: dataset {dataset}: label_map", label_map
        if corpus.preprocess.orthologs is not None:
            yield option("preprocess.orthologs"), corpus.preprocess.orthologs
        vocabulary = corpus.vocabulary
        if vocabulary.genes is not None:
            yield option("vocabulary.genes"), vocabulary.genes
        if vocabulary.medians is not None:
            medians = option("vocabulary.medians")
            yield from _files_of_model(medians, vocabulary.medians, vocabulary.medians)
    for name, run in pipeline.runs.items():
        option = partial(pipeline.as_written, "runs", name)
        gene_vectors = getattr(run.model, "gene_vectors", None)
        if gene_vectors is not None:
            yield option("model.gene_vectors"), gene_vectors
        for path in pipeline.teacher_files(name):
            yield f"{option('objective')}.teacher", path
        for task in run.evaluate.tasks.values():
            for key, path in task.paths().items():
                yield option(f"evaluate.tasks.{task.name}.{key}"), path
        for external, model in run.evaluate.external.items():
            key = option(f"evaluate.external.{external}")
            for path in model.files:
                yield f"{key}.files", path
            yield from _files_of_model(f"{key}.model", model.model)
        if run.init_from not in pipeline.runs:
            yield from _files_of_model(option("init_from"), run.init_from)
    for package, python in pipeline.bridges.items():
        if "/" in python:
            yield f"bridges.{package}", python


def _files_of_model(
    option: str, model: str | None, file: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield option and path of each file of a model that an option names.

    All files of a published folder, or `file` of a model folder, by default the weights.
    """
    if model is None:
        return
    if is_url(model):  # a wrong one would match no rule, whose outputs may be there
        if file is not None:
            raise DataError(f"{option}: expected a path, got {model!r}")
        if not re.fullmatch(f"hf://{HUB_MODEL}", model):
            raise DataError(
                f"{option}: expected hf://owner/name or hf://owner/name@revision, got {model!r}"
            )
        return
    published = PublishedFolder.named_by(model)
    if published is None:
        yield option, file or str(Path(model) / "model.safetensors")
        return
    try:
        for path in published.files():
            yield option, str(path)
    except DataError as error:
        raise DataError(f"{option}: {error}") from None


def _gone(pipeline: Workflow, corpus: str, is_made: Callable[[str], bool]) -> Iterator[str]:
    """Yield the preprocessed cells of datasets whose input is missing.

    Raises DataError if a dataset has none, or if they come from another file.
    """
    table = pipeline.datasets(corpus)
    read = read_by_runs(pipeline, corpus)
    for name in table:
        text = table[name].path
        path = Path(text)
        cells = Path(CELLS.format(corpus=corpus, dataset=name))
        where = f"{pipeline.corpora[corpus].table}: dataset {name}: {text}"
        if is_url(text) or is_made(text):
            continue
        kind = special_kind(path)
        if kind is not None:  # opening a FIFO would wait without end
            raise DataError(f"{where}: expected a file or folder, got a {kind}")
        if path.exists() or (name not in read and not cells.exists()):
            continue
        # Snakemake names it only if no later output stands, such as the report of other runs
        if not cells.exists():
            advice = "correct the path, or put the file there"
            source = table[name].source or ""
            if source.startswith("cellmill "):
                advice = f"make it: {source}"
            raise DataError(f"{where}: no such file; {advice}")
        report = cells.with_suffix(".json")
        origin = read_json(report)["source"]["file"] if report.exists() else None
        if origin != path.name:
            raise DataError(
                f"{where}: no such file, and {cells} is of {origin}; correct the path, or delete the cells"
            )
        yield str(cells)
