"""Mutated inputs of every format: each is read, or refused in one line, in bounded time and memory.

    python -m tests.unit.fuzzed_inputs 2000 7    # files, seed

A file is a pure function of seed and number, and read in a process of its own: a crash of a library
is seen too.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
import zarr

from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.h5_walk import check_walk
from cellmill.errors import UserError
from tests.unit.test_containers import DONORS, adt_of, rna_of, seurat, write_mudata
from tests.unit.test_inputs import h5ad, in_zarr, loom, matrix_market, tenx_v3, with_filter
from tests.unit.test_matrix_market import alevin, csv_barcodes, excel, kb, parse, quoted, star
from tests.unit.test_other_tools import flex
from tests.unit.test_text_counts import TABLES

TIMEOUT_S = 60
MEMORY = 6 << 30  # bytes of address space, of which libraries take more than one GB
ODD = (
    -1,
    0,
    3,
    10**6,
    2**31,
    2**62,
    1.5,
    float("nan"),
    "text",
    b"\xff",
    [],
    [1, 2, 3],
    [[1, 2], [3, 4]],
)


def write_bases(folder: Path) -> None:
    """One input of each format."""
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(1.0, (230, 37)).astype(np.float32))
    for name, form in {
        "csr": sp.csr_matrix,
        "csc": sp.csc_matrix,
        "dense": sp.csr_matrix.toarray,
    }.items():
        h5ad(form(counts), folder / f"{name}.h5ad")
        for version in (2, 3):
            in_zarr(counts, folder, form, version).rename(folder / f"{name}{version}.zarr")
    with_filter(counts, folder, compression="gzip")
    tenx_v3(counts, folder)
    loom(counts, folder)
    (folder / "market").mkdir()
    matrix_market(counts, folder / "market")
    flex(counts, folder)
    seurat(counts, folder / "seurat.h5ad", counts, counts)
    for name, end in (("mudata", "h5mu"), ("mudata2", "zarr")):
        data = {"rna": rna_of(counts), "prot": adt_of(counts)}
        if end == "zarr":
            write_mudata(zarr.open_group(folder / f"{name}.zarr", mode="w"), data, DONORS)
        else:
            with h5py.File(folder / f"{name}.h5mu", "w") as file:
                write_mudata(file, data, DONORS)
    for layout in (kb, parse, alevin, star, quoted, csv_barcodes, excel):
        (folder / layout.__name__).mkdir()
        layout(folder / layout.__name__)
    for number, write in enumerate(TABLES.values()):
        (folder / f"table{number}").mkdir()
        table = write(folder / f"table{number}")
        table.rename(folder / f"table{number}-{table.name}")
        (folder / f"table{number}").rmdir()


def pick(random: np.random.Generator, items: Sequence[Any]) -> Any:
    return items[int(random.integers(len(items)))]


def mutate(path: Path, random: np.random.Generator) -> None:
    """Damage an input in place."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    file = pick(random, files)
    kinds = [_flip, _cut, _flip]
    if h5py.is_hdf5(file):
        kinds += [_change_h5] * 9
    if file.suffix == ".json" or file.name.startswith(".z"):
        kinds += [_change_json] * 9
    pick(random, kinds)(file, random)


def _flip(file: Path, random: np.random.Generator) -> None:
    content = bytearray(file.read_bytes() or b"x")
    for position in random.integers(0, len(content), int(random.integers(1, 12))).tolist():
        content[position] = int(random.integers(256))
    file.write_bytes(content)


def _cut(file: Path, random: np.random.Generator) -> None:
    content = file.read_bytes()
    stop = int(random.integers(len(content) + 1))
    file.write_bytes(content[:stop] + bytes(int(random.integers(2)) * (len(content) - stop)))


def _change_json(file: Path, random: np.random.Generator) -> None:
    value = json.loads(file.read_text())
    entries: list[tuple[Any, Any]] = []

    def collect(item: Any) -> None:
        for key in (
            item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        ):
            entries.append((item, key))
            collect(item[key])

    collect(value)
    if entries:
        owner, key = pick(random, entries)
        odd = pick(random, ODD)
        owner[key] = None if isinstance(odd, bytes) else odd
        file.write_text(json.dumps(value))


def _change_h5(file: Path, random: np.random.Generator) -> None:
    """One of six changes to an object: none of it, an attribute, a value, a loop, a huge array,
    another array.
    """
    with h5py.File(file, "a") as opened:
        names: list[str] = []
        opened.visit(names.append)
        name = pick(random, names)
        kind = int(random.integers(6))
        odd = pick(random, ODD)
        stored = opened[name]
        attributes = dict(stored.attrs)
        if kind == 1 and attributes:
            stored.attrs[pick(random, sorted(attributes))] = odd
            return
        if (
            kind == 2
            and isinstance(stored, h5py.Dataset)
            and stored.ndim
            and stored.dtype.kind in "iuf"
        ):
            flat = stored[()].reshape(-1)
            flat[int(random.integers(len(flat)))] = random.choice([0, 1, 100, 127, 11, 23])
            stored[...] = flat.reshape(stored.shape)
            return
        del opened[name]
        if kind == 3:
            opened[name] = h5py.SoftLink(f"/{name}")
        elif kind == 4:
            opened.create_dataset(
                name, (int(random.choice([10**6, 10**12])),), "i4", chunks=(4096,)
            )
        elif kind != 0:
            opened[name] = odd
        if kind not in (0, 3):
            opened[name].attrs.update(attributes)


def read_whole(path: Path) -> None:
    """Read an input. Exit code 0 if it is read or refused in one line, else 1 with the reason on
    stderr.
    """
    signal.alarm(TIMEOUT_S)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        with open_counts(path) as reader:
            n_cells = 0
            for block in reader.rows(7):
                assert block.has_canonical_format
                assert block.shape[1] == len(reader.var)
                n_cells += block.shape[0]
            assert n_cells == len(reader.obs)
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError("more than one line") from error


def is_refused_by_walk(path: Path) -> bool:
    """True if the child process that walks HDF5 files refuses the file."""
    try:
        check_walk([path])
    except UserError:
        return True
    return False


def in_process(work: Callable[[], object]) -> int:
    """Exit status of `work` in a process of its own; a signal is negative."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Read mutated inputs; exit 1 if one ends in anything but success or a line."""
    (files, seed), failed = map(int, sys.argv[1:]), 0
    with tempfile.TemporaryDirectory() as folder:
        bases = Path(folder, "bases")
        work = Path(folder, "work")
        bases.mkdir()
        assert in_process(lambda: write_bases(bases)) == 0
        names = sorted(bases.iterdir())
        names += 2 * [path for path in names if path.suffix == ".h5ad"]  # half of the files
        for number in range(files):
            random = np.random.Generator(np.random.Philox(key=[seed, number]))
            base = names[number % len(names)]
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            path = work / base.name
            shutil.copytree(base, path) if base.is_dir() else shutil.copy(base, path)
            mutate(path, random)
            status = in_process(lambda path=path: read_whole(path))  # type: ignore[misc]
            # HDF5 crashes or does not end on it; open_dataset never opens a file that fails the walk
            if status < 0 and is_refused_by_walk(path):
                continue
            if status != 0:
                failed += 1
                print(f"seed {seed} file {number}: {base.name}: exit {status}", file=sys.stderr)
    print(f"{files - failed} of {files} are read or refused in one line")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
