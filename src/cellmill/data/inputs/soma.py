"""SOMA experiments: local folders, and queries of any URI.

CELLxGENE Census, for example, has one experiment for each organism. A cell is a row of obs, a gene a
row of a measurement's var, both numbered by `soma_joinid`; `counts` is X (the only layer, or `raw`),
the name of a layer, or raw for measurement `raw`. Counts are read a block of cells at a time. An
experiment whose parts are elsewhere is refused.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.h5 import one_line, reading
from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.inputs.source import CountSource, Format, as_obs, optional_package
from cellmill.errors import DataError, require_known

_MARK = "__tiledb_group.tdb"
_ROWS = "soma_joinid"
_RAW = "raw"
_CELLS = ("obs_id", "observation_joinid")
_GENES = ("feature_id", "var_id")
_PUBLIC = "s3://cellxgene-census-public-us-west-2/"
_PUBLIC_CONFIG = {"vfs.s3.region": "us-west-2", "vfs.s3.no_sign_request": "true"}


def open_query(uri: str, name: Path, counts: str, value_filter: str | None = None) -> CountSource:
    """Open the cells of the experiment at `uri` that pass a filter of SOMA.

    A filter is such as `tissue == 'lung'`. `name` stands for the input in messages. Raises DataError
    when it is not an experiment, or the filter is invalid or keeps no cell, and ConfigError without
    tiledbsoma.
    """
    soma = optional_package("tiledbsoma", "soma")
    with reading(name), ExitStack() as stack:
        config = _PUBLIC_CONFIG if uri.startswith(_PUBLIC) else {}
        context = soma.SOMATileDBContext(tiledb_config=config)
        experiment = stack.enter_context(soma.open(uri, context=context))
        if not isinstance(experiment, soma.Experiment):
            raise DataError(
                f"{name}: not an experiment; of a Census give soma/census_data/homo_sapiens"
            )
        measurement, layer = _choose_layer(name, experiment.ms, counts)
        array = measurement.X[layer]
        for part in (experiment.obs, measurement.var, array):
            if not part.uri.startswith(experiment.uri.rstrip("/") + "/"):
                raise DataError(
                    f"{name}: {part.uri} is elsewhere; expected an experiment that holds its own data"
                )
        if not isinstance(array, soma.SparseNDArray):
            raise DataError(
                f"{name}: expected a sparse array of counts, got a {type(array).__name__}; write the experiment with "
                "X_kind=tiledbsoma.SparseNDArray"
            )
        obs = _table(name, experiment.obs, value_filter)
        var = _table(name, measurement.var)
        if not len(obs):
            raise DataError(f"{name}: no cell fulfils the filter {value_filter!r}")
        matrix = _SomaMatrix(name, array, obs[_ROWS].to_numpy(), var[_ROWS].to_numpy())
        read_as = layer if counts == "X" else counts
        return CountSource(
            name,
            counts,
            matrix,
            _named(obs, experiment.obs, _CELLS),
            _named(var, measurement.var, _GENES),
            others=[other for other in _layers(experiment.ms) if other not in (counts, read_as)],
            close_file=stack.pop_all().close,
        )


def _choose_layer(name: Path, measurements: Any, counts: str) -> tuple[Any, str]:
    """Measurement and layer that `counts` names: X is the only layer of RNA, or its layer `raw`.

    tiledbsoma.io keeps the `raw` of an AnnData as a measurement `raw`, with one layer and genes of
    its own.
    """
    measurement = _choose_measurement(name, measurements)
    layers = sorted(measurement.X)
    if counts == "X" and len(layers) == 1:
        return measurement, layers[0]
    if counts == _RAW and _RAW not in layers and _RAW in measurements:
        raw = measurements[_RAW]
        layers = list(raw.X)
        return raw, layers[0] if len(layers) == 1 else _RAW
    wanted = _RAW if counts == "X" else counts
    require_known(wanted, _layers(measurements), f"{name}: no layer {wanted!r}")
    return measurement, wanted


def _layers(measurements: Any) -> list[str]:
    """Values of `counts` other than X."""
    chosen = "RNA" if "RNA" in measurements else min(measurements)
    layers = sorted(measurements[chosen].X)
    if _RAW in measurements and _RAW not in layers:
        layers.append(_RAW)
    return layers


class _SomaMatrix(StoredMatrix):
    """Sparse array of an experiment.

    `cells` and `genes` are the numbers of the rows and columns to read, ascending.
    """

    def __init__(self, name: Path, array: Any, cells: np.ndarray, genes: np.ndarray) -> None:
        self._name = name
        self._array = array
        self._cells = cells
        self._genes = genes
        self.shape = (len(cells), len(genes))

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for first in range(start, len(self._cells), block):
            cells = self._cells[first : first + block]
            with reading(self._name):
                parts = list(self._array.read((cells, slice(None))).tables())
                if not parts:
                    yield sp.csr_matrix((len(cells), self.shape[1]), dtype=np.float32)
                    continue
                rows = _join(parts, "soma_dim_0")
                columns = _join(parts, "soma_dim_1")
                values = _join(parts, "soma_data")
                cell = np.searchsorted(cells, rows)
                gene = np.searchsorted(self._genes, columns)
                if (self._genes.take(gene, mode="clip") != columns).any():
                    raise DataError(
                        f"{self._name}: damaged: a count of a gene that var does not have"
                    )
                yield sp.csr_matrix((values, (cell, gene)), shape=(len(cells), self.shape[1]))


def _join(parts: list[Any], column: str) -> np.ndarray:
    return np.concatenate([part.column(column).to_numpy() for part in parts])


def _choose_measurement(name: Path, measurements: Any) -> Any:
    """The only measurement, or RNA."""
    known = sorted(measurements)
    wanted = known[0] if len(known) == 1 else "RNA"
    require_known(wanted, known, f"{name}: no measurement {wanted!r}")
    return measurements[wanted]


def _table(name: Path, frame: Any, value_filter: str | None = None) -> pd.DataFrame:
    try:
        table = frame.read(value_filter=value_filter).concat().to_pandas()
    except Exception as error:  # of many kinds, some with a traceback in their text
        if value_filter is None:
            raise
        words = one_line(error).split(" At: ")[0].removeprefix("SOMAError: ").strip("' ")
        raise DataError(f"{name}: filter {value_filter!r}: {words}") from None
    return table.sort_values(_ROWS, ignore_index=True)


def _named(table: pd.DataFrame, frame: Any, names: tuple[str, ...]) -> pd.DataFrame:
    """Index the columns of `table` by the first of `names` that it has, else by number.

    Last comes the index of the AnnData that the experiment was written from, if it says which column
    that is.
    """
    written = frame.metadata.get("soma_dataframe_original_index_name")
    original = json.loads(written) if isinstance(written, str) else None
    index = next((name for name in (*names, original) if name in table), _ROWS)
    columns = table.drop(columns={index, _ROWS})
    if "feature_name" in columns:
        columns = columns.assign(symbol=columns["feature_name"])
    return as_obs(columns, table[index].astype(str).tolist())


FORMAT = Format(
    "SOMA experiment",
    lambda path, file: path.is_dir() and ((path / _MARK).exists() or (path / "__group").is_dir()),
    lambda path, file, counts: open_query(f"file://{path.absolute()}", path, counts),
)
