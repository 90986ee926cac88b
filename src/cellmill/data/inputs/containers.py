"""Files that hold several AnnData: MuData and SpatialData.

MuData (.h5mu, .zarr) has one for each modality, and SpatialData (.zarr) has tables. `path#rna` names
one; `counts` may say it too, as `rna#X`. Without it the only one is read, or the only one with RNA. obs
has the columns of the modality, and of the whole file if these have other names.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.inputs.h5 import decode
from cellmill.data.inputs.matrices import WHOLE, is_array
from cellmill.errors import DataError, require_known

_RNA = re.compile(r"rna|gex|gene[ _-]?expression|transcriptom\w*|genes?", re.IGNORECASE)
_FOLDERS = ("mod", "tables", "table")
_ENSEMBL = re.compile(r"ENS[A-Z]*G\d{11}")


def split_part(path: Path, counts: str = "X") -> tuple[Path, str]:
    """Split `path#part` into the file and `part#counts`.

    Path and `counts` stay as they are if the path has no part.
    """
    text = str(path)
    file, mark, part = text.rpartition("#")
    if not mark or not part or path.exists() or not Path(file).exists():
        return path, counts
    return Path(file), f"{part}#{counts}"


def members(group: Any, name: str) -> list[str]:
    """Sorted names in a group of `group`; none if it has no such group."""
    item = group.get(name)
    return [] if item is None or is_array(item) else sorted(map(str, item))


def is_anndata(group: Any) -> bool:
    """True for a group with obs and var that is no MuData."""
    if group is None or is_array(group):
        return False
    return "obs" in group and "var" in group and "mod" not in group


def parts_of(group: Any) -> dict[str, str]:
    """Paths of the AnnData in a file of several, by name."""
    parts = {}
    for folder in _FOLDERS:
        for name in members(group, folder):
            if is_anndata(group[folder].get(name)):
                parts[name] = f"{folder}/{name}"
    return parts


def choose_part(path: Path, group: Any, wanted: str | None) -> str:
    """Path of the AnnData `wanted`, by default the only one or the only one with RNA.

    Raises DataError listing all.
    """
    parts = parts_of(group)
    if not parts:
        raise DataError(
            f"{path}: holds no AnnData: no group with obs and var in {', '.join(_FOLDERS)}"
        )
    if wanted is not None:
        by_path = {group_path: name for name, group_path in parts.items()}
        name = by_path.get(wanted.strip("/"), wanted)
        require_known(name, [*parts], f"{path}: no modality or table {wanted!r}")
        return parts[name]
    names = list(parts)
    if len(names) > 1:
        names = [name for name in parts if _RNA.fullmatch(name)]
    if not names:
        names = [name for name in parts if _has_genes(group[parts[name]])]
    if len(names) != 1:
        sizes = [f"{name} ({_size(group[group_path])})" for name, group_path in parts.items()]
        listed = ", ".join(sizes)
        raise DataError(f"{path}: holds {listed}; name one, as in {path}#{next(iter(parts))}")
    return parts[names[0]]


def stored_index(frame: Any) -> Any:
    """Stored index of a data frame; None if it has none."""
    if is_array(frame):
        return frame
    array = frame.get(decode(frame.attrs.get("_index", "_index")))
    if array is None or is_array(array):
        return array
    return array.get("values")  # text of pandas 3: values and a mask


def _size(group: Any) -> str:
    lengths = [getattr(stored_index(group[name]), "shape", None) for name in ("obs", "var")]
    return " x ".join(f"{length[0]:,}" if length else "?" for length in lengths)


def _has_genes(group: Any) -> bool:
    """True if most of the first names are Ensembl ids of genes."""
    array = stored_index(group["var"])
    if not is_array(array) or len(array.shape) != 1 or array.dtype.names is not None:
        return False
    names = list(map(decode, array[:100]))
    return 2 * sum(bool(_ENSEMBL.match(name)) for name in names) > len(names)


def add_columns(path: Path, obs: pd.DataFrame, whole: pd.DataFrame, obsmap: Any) -> pd.DataFrame:
    """obs of a modality with those columns of the whole file that it lacks.

    Cells are joined by name: MuData's `obsmap`, for each cell of the file its row in the modality
    (from 1) or 0, is out of date if a modality was sorted or filtered before writing. It is read
    only if names repeat. MuDataSeurat writes none.
    """
    names = [name for name in whole if name not in obs and ":" not in str(name)]
    is_map = is_array(obsmap) and obsmap.shape == (len(whole),) and obsmap.dtype.kind in WHOLE
    if names and whole.index.is_unique and obs.index.isin(whole.index).all():
        return pd.concat([obs, whole.loc[obs.index, names]], axis=1)
    if not names or not is_map:
        return obs
    rows = obsmap[:].astype(np.int64)
    cells = np.flatnonzero(rows > 0)
    if sorted(rows[cells].tolist()) != list(range(1, len(obs) + 1)):
        raise DataError(f"{path}: damaged: obsmap does not name every cell of the modality once")
    order = cells[np.argsort(rows[cells])]
    more = whole[names].iloc[order].set_axis(obs.index, axis=0)
    return pd.concat([obs, more], axis=1)
