"""Files and packages that the configuration needs, looked for before anything runs.

Snakemake takes an output whose input is missing as it is, and says nothing: a mistyped path would leave the results of
the file that was named before.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from cellmill.config.input_url import is_url
from cellmill.config.workflow import Workflow
from cellmill.data.dataset_check import read_by_runs
from cellmill.errors import ConfigError, DataError
from cellmill.files import read_json, special_kind

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
