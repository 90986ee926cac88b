"""A preprocessing whose process was killed: measures, rows and packed rows next to its output are
kept, or left if they are of other inputs.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from killed import NEVER, Steps, run_in_process, run_to_the_end, run_two

from cellmill.config.options import PreprocessOptions
from cellmill.data import saved_work
from cellmill.data.inputs import packed_cells
from cellmill.data.prepare import measure
from cellmill.files import sha256_file
from cellmill.stages import data as stage

BLOCK = 32
BLOCKS_SAVED = 3
N_BLOCKS = 38  # 19 of 600 cells are measured, and then packed


@pytest.fixture(scope="module")
def cells(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells with estimated counts, of which some fail, and a cell with a gene of its own only."""
    data = ad.read_h5ad(simulated)
    counts = data.X.toarray().astype(np.float32)
    counts[:, 7] *= 1.5
    counts[::9] //= 40
    counts[:, 3] = 0
    counts[300] = 0
    counts[300, 3] = 900
    data.X = sp.csr_matrix(counts)
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    data.write_h5ad(path)
    return path


def run_stage(cells: Path, out: Path, killed_after: int = NEVER, **options: Any) -> int | None:
    """Run stage `preprocess` in a process that kill -9 ends after a number of measured and packed
    blocks.

    Return their number, and None if it was killed.
    """
    return run_in_process(count, out, cells, out, killed_after, options)


def count(cells: Path, out: Path, killed_after: int, options: dict[str, Any]) -> None:
    steps = Steps(killed_after)
    spill = measure.RowSpill.add
    pack = packed_cells.PackedBlocks.add

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "_BLOCK", BLOCK)
        patched.setattr(saved_work, "SAVE_EVERY", BLOCK * BLOCKS_SAVED)
        for owner, add in ((measure.RowSpill, spill), (packed_cells.PackedBlocks, pack)):
            patched.setattr(owner, "add", lambda *given, add=add: steps.take(add, *given))
        given = {"min_genes": 1, "min_counts": 500, "min_cells": 2, "max_mito_frac": 1.0} | options
        rule = given.pop("counts_rule", "stochastic")
        stage.preprocess(
            options=PreprocessOptions.model_validate({"preprocess": given}),
            input=cells,
            counts="X",
            dataset="d",
            counts_rule=rule,
            out=out,
            report=out.with_suffix(".json"),
        )
    steps.write(out)


def assert_equal(out: Path, whole: Path) -> None:
    """The cells and the report are equal, and nothing else is left."""
    assert sha256_file(out) == sha256_file(whole)
    assert out.with_suffix(".json").read_text() == whole.with_suffix(".json").read_text()
    names = {out.name, out.with_suffix(".json").name, out.with_suffix(".counted").name}
    assert {path.name for path in out.parent.iterdir()} == names


@pytest.fixture(scope="module")
def whole(cells: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells of a process that was not killed."""
    out = tmp_path_factory.mktemp("whole") / "cells.h5ad"
    assert run_stage(cells, out) == N_BLOCKS
    data = ad.read_h5ad(out)
    assert 400 < data.n_obs < 600
    assert "cell_300" not in data.obs_names
    report = out.with_suffix(".json").read_text()
    assert '"no gene left": 1' in report
    assert '"n_rounded": ' in report
    return out


@pytest.mark.parametrize(
    "killed_after",
    [
        (7, 14),  # both while it measures
        (5, 30, 3),  # while it packs, twice
        pytest.param((2,), marks=pytest.mark.full),  # before anything is saved
        pytest.param((20,), marks=pytest.mark.full),
        pytest.param((37, 2), marks=pytest.mark.full),
    ],
)
def test_a_killed_preprocessing_is_resumed_bit_for_bit(
    cells: Path, tmp_path: Path, whole: Path, killed_after: tuple[int, ...]
) -> None:
    out = tmp_path / "cells.h5ad"
    counted = run_to_the_end(lambda n: run_stage(cells, out, n), out, killed_after)
    assert N_BLOCKS <= counted < N_BLOCKS + BLOCKS_SAVED * len(killed_after)
    assert_equal(out, whole)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("nothing", None),
        ("cells", "changed: input"),
        ("rule", "changed: input"),
        ("options", "changed: options"),
        ("state", "damaged"),
        ("numbers", "damaged"),
        ("rows", "damaged"),
    ],
)
def test_work_on_other_inputs_is_not_resumed(
    cells: Path,
    tmp_path: Path,
    whole: Path,
    changed: str,
    reason: str | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "cells.h5ad"
    shutil.copy(cells, copy)
    out = tmp_path / "out" / "cells.h5ad"
    assert run_stage(copy, out, 7) is None
    state = out.with_name(".cells.h5ad.partial.measured")
    [rows] = out.parent.glob(".cells.h5ad.partial.rows-*")
    options: dict[str, Any] = {}
    if changed == "cells":
        os.utime(copy)
    elif changed == "rule":
        options = {"counts_rule": "round"}
    elif changed == "options":
        options = {"min_cells": 3}
    elif changed == "state":
        state.write_bytes(state.read_bytes()[:-9])
    elif changed == "numbers":
        state.write_bytes(state.read_bytes()[:-1] + b"\x55")
    elif changed == "rows":
        rows.write_bytes(rows.read_bytes()[:1000])
    capfd.readouterr()
    rest = run_stage(copy, out, **options)
    lines = capfd.readouterr()
    if reason is None:
        assert rest == N_BLOCKS - 6
        assert lines.out.startswith("cells: 192 cells are measured already\n")
        assert lines.err == ""
    else:
        assert rest == N_BLOCKS
        line = f"{out}: what a killed process saved is not used ({reason}); the work begins again\n"
        assert lines.err == line
    if options:
        whole = tmp_path / "whole" / "cells.h5ad"
        run_stage(copy, whole, **options)
    assert_equal(out, whole)


def test_two_processes_that_write_one_output_keep_apart(
    cells: Path, tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "cells.h5ad"
    assert run_stage(cells, out, 24) is None
    run_two(count, cells, out, NEVER, {})
    assert_equal(out, whole)


def test_a_small_file_saves_no_state(cells: Path, tmp_path: Path) -> None:
    out = tmp_path / "cells.h5ad"
    saved = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved_work.SavedWork, "save", lambda *given: saved.append(given))
        stage.preprocess(
            options=PreprocessOptions.model_validate({"preprocess": {"min_genes": 0}}),
            input=cells,
            counts="X",
            dataset="d",
            counts_rule="round",
            out=out,
            report=out.with_suffix(".json"),
        )
    assert not saved
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "cells.json"}
