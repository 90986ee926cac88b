"""Files of results: embeddings and predictions in .h5ad files, and scores.csv.

Embeddings and predictions are written to a new file, or added to a copy of the file of the cells.
"""

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem

from cellmill.config.load import Tree
from cellmill.data.arrays import plain_text
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.frames import open_obs
from cellmill.data.inputs.h5 import (
    check_h5ad,
    create_h5,
    one_line,
    open_h5,
    write_anndata,
    write_columns,
)
from cellmill.data.inputs.reader import keep_apart, refuse_duplicates
from cellmill.data.inputs.source import StoredObs
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.annotations import (
    ABOUT_PREDICTION,
    ABOUTS,
    Annotations,
    list_prediction_names,
)
from cellmill.files import atomic_path, digest, refuse_overwriting
from cellmill.runs.results import DatasetResult, Row

KEY = "X_cellmill"  # key of obsm with the vectors of stage embed
ABOUT = "cellmill"  # key of uns with facts about the model and stage embed

# places of vectors in a file, in the words of messages
OWN = f"obsm[{KEY!r}]"
EXTERNAL = "obsm['X_emb']"  # vectors of a model of another package
# paths of these places in the file
PATHS = {OWN: f"obsm/{KEY}", EXTERNAL: "obsm/X_emb", "X": "X"}

EMBEDDER = "embedder_digest"  # of `digest_embedder`, in uns[ABOUT]
OTHER_SECTIONS = "the model's weights with other sections model or tokens of config.json"
EMBED_AGAIN = "run embed again"  # remedy in messages
# columns of scores.csv
FIELDS = ("dataset", "task", "name", "kind", "column", "statistic", "repetition", "value")


def check_input(input: Path | str, out: Path, append: bool | None = None) -> Path:
    """Check the arguments of a command, and return the path of `input` on this machine.

    `append` is None for a command without this option. Raises ConfigError if the command cannot write
    `out`, or if it cannot append to `input`.
    """
    check_h5ad(out, "--out")
    path = local_input(input)
    if not append:
        remedy = "name another file" if append is None else "add --append to keep all that is in it"
        refuse_overwriting(out, [("--input", path)], remedy=remedy)
    elif path.suffix != ".h5ad":
        raise ConfigError(f"--append adds to an .h5ad, {input} is none; leave --append out")
    return path


def write_embedding(
    path: Path,
    obs: pd.DataFrame | StoredObs,
    vectors: np.ndarray,
    about: dict[str, Any],
    source: Path | None = None,
) -> None:
    """Write vectors to obsm["X_cellmill"] and facts to uns["cellmill"] of the file `path`.

    The file is new and has `obs`, or it is a copy of the .h5ad file `source`. If `obs` is a `StoredObs`, only
    one column of it is in memory at a time.
    """
    with _create(path, obs.index, source) as file:
        _add(file, obs, {KEY: vectors}, {ABOUT: about}, source)


def write_prediction(
    path: Path, obs: pd.DataFrame, predicted: Annotations, source: Path | None = None
) -> None:
    """Write predictions to the file `path`. They replace earlier predictions.

    The file is new and has `obs`, or it is a copy of the .h5ad file `source`.
    """
    columns = predicted.obs
    with _create(path, obs.index, source) as file:
        # add the new predictions; obs of a copy is changed below
        about = {predicted.key: predicted.about}
        earlier = file.get(f"uns/{ABOUT_PREDICTION}")
        keys = earlier if isinstance(earlier, h5py.Group) else ()
        replaced = list_prediction_names(keys, predicted.about)
        obs = obs.drop(columns=replaced & {*obs.columns})
        _add(file, obs.assign(**columns), predicted.obsm, about, source)
        if source is None:
            return

        # delete earlier predictions from the copy
        obs = file["obs"]
        if not isinstance(obs, h5py.Group):
            raise DataError(
                f"{source}: its obs is of an AnnData before 0.7; read and write it once, or leave out --append"
            )
        for key in ABOUTS:
            if key in file["uns"] and key != predicted.key:
                del file["uns"][key]
        for name in replaced:
            if name in obs and name not in columns:
                del obs[name]
            if name in file["obsm"] and name not in predicted.obsm:
                del file["obsm"][name]

        # write the columns of the new predictions, as the last ones
        for name, column in plain_text(pd.DataFrame(columns)).items():
            is_categorical = isinstance(column.dtype, pd.CategoricalDtype)
            write_elem(obs, name, column.array if is_categorical else column.to_numpy())
        order = [name for name in obs.attrs["column-order"] if name not in columns and name in obs]
        obs.attrs["column-order"] = np.array([*order, *columns], dtype=h5py.string_dtype())


@contextmanager
def _create(path: Path, names: pd.Index, source: Path | None) -> Iterator[h5py.File]:
    """Create a file at `path`, empty or as a copy of `source`. A `path` that links to `source` stays a link.

    Raises DataError if the cells of the copy are not `names`. Then `source` was written again after it had
    been read.
    """
    is_source = source is not None and path.resolve() == source.resolve()
    with create_h5(path.resolve() if is_source else path, copy_of=source) as file:
        if source is not None:
            stored, _ = keep_apart(open_obs(source, file).index)
            remedy = "; it has changed since it was read: run the command again"
            _refuse_other_cells(str(source), stored, names, "the file that was read", remedy)
        yield file


def _add(
    file: h5py.File,
    obs: pd.DataFrame | StoredObs,
    obsm: Mapping[str, Any],
    uns: Mapping[str, Any],
    source: Path | None,
) -> None:
    """Write obs, obsm and uns to a new file without X, or only obsm and uns to a copy of `source`."""
    # anndata's own function for files is not used: it crashes Python if the disk is full
    if source is None:
        is_stored = isinstance(obs, StoredObs)
        frame = pd.DataFrame(index=obs.index) if is_stored else obs
        write_anndata(file, ad.AnnData(obs=frame, obsm=dict(obsm), uns=dict(uns)))
        if is_stored:
            write_columns(file["obs"], (obs.read([name])[name] for name in obs.columns))
        return
    for group, entries in (("obsm", obsm), ("uns", uns)):
        if group not in file:
            write_elem(file, group, {})
        for name, value in entries.items():
            write_elem(file[group], name, value)


def digest_embedder(config: Tree) -> str:
    """Return a digest of all that the vectors of a cell depend on, from a model's config.json."""
    keys = ("weights_sha256", "vocabulary_digest", "model", "tokens")
    parts = {key: config[key] for key in keys}
    if config["model"]["family"] == "hf":
        # where its first weights were found, which may be moved
        places = ("path", "revision", "weights")
        parts["model"] = {key: config["model"][key] for key in config["model"].keys() - places}
    return digest([*parts.values()])


def has_embedder(path: Path) -> bool:
    """Return whether a file of `write_embedding` has the digest of its embedder, as earlier versions' have not."""
    with open_h5(path, EMBED_AGAIN) as file, explain_damage(f"{path}: uns", f"; {EMBED_AGAIN}"):
        return EMBEDDER in file["uns"][ABOUT]


def read_embedding(
    path: Path, names: pd.Index, model_digest: str, width: int | None, embedder: str | None = None
) -> np.ndarray:
    """Read the vectors of a file that `write_embedding` has written, `(cells, width)` float32.

    A row is finite, or all NaN. If `width` is None, vectors may have any width. Raises DataError if the
    file comes from another model, by the digest of its weights and `digest_embedder`, or if its obs
    names are not `names` in their order.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; run embed first")
    with open_h5(path, EMBED_AGAIN) as file:
        stored = _read(file, str(path), (OWN,), f"; {EMBED_AGAIN}")
    remedy = f"; give the cells that were embedded, or {EMBED_AGAIN}"
    _refuse_other_cells(str(path), stored.names, names, "the dataset", remedy)
    vectors = stored.vectors
    found = str(stored.about.get("model_digest"))
    if found != model_digest:
        raise DataError(
            f"{path}: made by model {found[:12]}, expected {model_digest[:12]}; {EMBED_AGAIN}"
        )
    # files of earlier versions have no digest of the embedder
    if embedder not in (None, stored.about.get(EMBEDDER, embedder)):
        raise DataError(f"{path}: made by {OTHER_SECTIONS}; {EMBED_AGAIN}")
    if width not in (None, vectors.shape[1]):
        raise DataError(
            f"{path}: {OWN}: expected {width:,} columns, got {vectors.shape[1]:,}; {EMBED_AGAIN}"
        )
    is_finite = np.isfinite(vectors)
    is_wrong = (is_finite.any(axis=1) != is_finite.all(axis=1)) | np.isinf(vectors).any(axis=1)
    if is_wrong.any():
        raise DataError(
            f"{path}: cell {int(is_wrong.argmax()) + 1:,} has numbers that are not finite; {EMBED_AGAIN}"
        )
    return vectors


def read_costs(path: Path) -> dict[str, float]:
    """Read `seconds`, `peak_gb` and `coverage_frac` of the stage embed that has written a file."""
    with (
        open_h5(path, EMBED_AGAIN) as file,
        explain_damage(f"{path}: uns[{ABOUT!r}]", f"; {EMBED_AGAIN}"),
    ):
        return {
            name: float(read_elem(file["uns"][ABOUT][name]))
            for name in ("seconds", "peak_gb", "coverage_frac")
        }


def read_external(path: Path, names: pd.Index, command: str) -> np.ndarray:
    """Read the vectors that a model of another package has written, `(cells, width)` float32, all finite.

    They are in obsm["X_emb"], in the key of stage embed, or in X. `command` is the command of that package,
    and begins each message. Raises DataError for a missing file, for other cells or another order of cells,
    and for numbers that are not finite.
    """
    if not path.exists():
        raise DataError(f"{command}: it ended well and wrote no file to {{out}}")
    with open_h5(path, command) as file:
        stored = _read(file, command, (EXTERNAL, OWN, "X"))
    _refuse_other_cells(command, stored.names, names, "{cells}", "")
    is_infinite = ~np.isfinite(stored.vectors).all(axis=1)
    if is_infinite.any():
        raise DataError(
            f"{command}: {int(is_infinite.sum()):,} cells have numbers in {stored.key} that are not finite, "
            f"the first is {names[int(is_infinite.argmax())]!r}; expected an embedding of every cell"
        )
    return stored.vectors


def read_vectors(path: Path) -> tuple[pd.Index, np.ndarray, dict[str, Any]]:
    """Read a file of vectors by stage embed or by another package.

    Returns obs names, vectors, and facts about the model. Vectors are `(cells, width)` float32. A row is
    finite, or all NaN. A file by another package has no facts.
    """
    with open_h5(path) as file:
        stored = _read(file, str(path), (OWN, EXTERNAL, "X"))
    refuse_duplicates(str(path), "obs", stored.names)
    vectors = stored.vectors
    vectors[~np.isfinite(vectors).all(axis=1)] = np.nan
    return stored.names, vectors, stored.about


class _StoredVectors(NamedTuple):
    """Content of a file of vectors."""

    names: pd.Index  # obs names
    key: str  # place of the vectors, a key of PATHS
    vectors: np.ndarray  # (cells, width) float32
    about: dict[str, Any]  # content of uns["cellmill"] if stage embed wrote the file, else empty


def _read(
    file: h5py.File, source: str, wanted: tuple[str, ...], remedy: str = ""
) -> _StoredVectors:
    """Read the vectors at the first of the places `wanted` that the file has.

    Messages begin with `source`, and end with `remedy`. Raises DataError if there are no vectors, or if
    they have another number of cells than obs.
    """
    with explain_damage(f"{source}: obs, obsm or uns", remedy):
        stored_names = pd.Index(read_elem(file["obs"][file["obs"].attrs["_index"]])).astype(str)
        key = next((name for name in wanted if PATHS[name] in file), wanted[-1])
        stored = file.get(PATHS[key])
        about = {}
        if key == OWN and stored is not None:
            about = dict(read_elem(file["uns"][ABOUT]))
    if not isinstance(stored, h5py.Dataset) or stored.ndim != 2 or stored.dtype.kind not in "fiu":
        # anndata 0.12 writes a null dataset for X = None, which has no shape
        is_dense = isinstance(stored, h5py.Dataset) and stored.shape is not None
        form = f"shape {stored.shape} of {stored.dtype}" if is_dense else "no dense array"
        raise DataError(
            f"{source}: expected a dense array of numbers in {' or '.join(wanted)}, got {form}{remedy}"
        )
    if stored.shape[0] != len(stored_names) or not stored.shape[1]:
        raise DataError(
            f"{source}: expected {len(stored_names):,} rows in {key}, got shape {stored.shape}{remedy}"
        )
    with explain_damage(f"{source}: {key}", remedy):
        return _StoredVectors(stored_names, key, np.asarray(stored[:], np.float32), about)


def _refuse_other_cells(
    source: str, stored: pd.Index, names: pd.Index, cells: str, remedy: str
) -> None:
    """Raise DataError unless the cells in `source`, called `stored`, have the expected `names` in their order.

    `cells` says in words which cells are expected. `remedy` ends the message.
    """
    if stored.astype(str).equals(names.astype(str)):
        return
    n_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stored, names)))
    got = repr(stored[n_equal]) if n_equal < len(stored) else "no cell"
    expected = repr(names[n_equal]) if n_equal < len(names) else "no cell"
    raise DataError(
        f"{source}: expected the {len(names):,} cells of {cells} in their order, got {len(stored):,}; the first "
        f"that differs is cell {n_equal + 1:,}, {got} instead of {expected}{remedy}"
    )


@contextmanager
def explain_damage(what: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of reading a damaged file into a DataError of one line about `what`."""
    try:
        yield
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{what} is missing or of another form{remedy}") from None
    except Exception as error:  # damaged bytes may raise almost any error
        raise DataError(f"{what} cannot be read: {one_line(error)}{remedy}") from None


def write_scores(path: Path, datasets: Mapping[str, DatasetResult]) -> None:
    """Write scores.csv to `path`: a line for every number of all rows of all tasks."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for name, dataset in datasets.items():
            for task, result in dataset.tasks.items():
                for row in result.rows:
                    about = name, task, row.method.name, row.method.kind
                    writer.writerows((*about, *line) for line in _list_numbers(row))


def _list_numbers(row: Row) -> Iterator[tuple[str, str, int | str, float]]:
    """Yield the numbers of a row, each as (column, statistic, number of the repetition, value).

    The statistic is `mean`, `sd`, `repetition` or `value`. Only a repetition has a number.
    """
    for column, score in row.scores.items():
        if score.mean is not None:
            yield column, "mean", "", score.mean
        if score.sd is not None:
            yield column, "sd", "", score.sd
        for number, repetition in enumerate(score.repetitions):
            if repetition is not None:
                yield column, "repetition", number, repetition
    for column, value in row.numbers.items():
        if isinstance(value, int | float):
            yield column, "value", "", value
