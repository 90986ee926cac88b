"""An embedding whose process was killed: vectors next to it are kept, or left if they are of other
inputs.
"""

import os
import shutil
from functools import partial
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from killed import NEVER, Steps, run_in_process, run_to_the_end, run_two

from cellmill.config.options import EmbedOptions
from cellmill.data import saved_work
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import DataError
from cellmill.evaluate.inference import embed as module
from cellmill.stages import cells as stage

BLOCK = 32
BLOCKS_SAVED = 3
N_BLOCKS = 19  # of 600 cells


def run_stage(
    model: Path, cells: Path, out: Path, killed_after: int = NEVER, budget: int = 1 << 30
) -> int | None:
    """Run stage `embed` in a process that kill -9 ends after a number of embedded blocks.

    Return how many it embedded, and None if it was killed.
    """
    return run_in_process(count, out, model, cells, out, killed_after, budget)


def count(model: Path, cells: Path, out: Path, killed_after: int, budget: int) -> None:
    steps = Steps(killed_after)
    torch.set_num_threads(1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "ROW_BLOCK", BLOCK)
        patched.setattr(saved_work, "SAVE_EVERY", BLOCK * BLOCKS_SAVED)
        patched.setattr(module, "to_tensors", partial(steps.take, module.to_tensors))
        options = EmbedOptions.model_validate({"embed": {"token_budget": budget}})
        stage.embed(options=options, model=model, input=cells, counts="X", out=out)
    steps.write(out)


def content(path: Path) -> tuple[bytes, pd.DataFrame, dict[str, object]]:
    """Vectors, obs and facts of an embedding, without what it cost."""
    data = ad.read_h5ad(path)
    about = {key: value for key, value in data.uns["cellmill"].items() if key not in COSTS}
    vectors = np.asarray(data.obsm["X_cellmill"])
    assert np.isfinite(vectors).any()
    return vectors.tobytes(), data.obs, about


COSTS = ("seconds", "peak_gb")


def assert_equal(path: Path, other: Path) -> None:
    vectors, obs, about = content(path)
    others = content(other)
    assert vectors == others[0]
    pd.testing.assert_frame_equal(obs, others[1])
    assert repr(about) == repr(others[2])


@pytest.fixture(scope="module")
def whole(corpus: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedding of a process that was not killed."""
    out = tmp_path_factory.mktemp("whole") / "cells.h5ad"
    assert run_stage(corpus["model"], corpus["cells"], out) == N_BLOCKS
    return out


@pytest.mark.parametrize("killed_after", [(5, 6, 4), pytest.param((2,), marks=pytest.mark.full)])
def test_a_killed_embedding_is_resumed_bit_for_bit(
    corpus: dict[str, Path], tmp_path: Path, whole: Path, killed_after: tuple[int, ...]
) -> None:
    cells = corpus["cells"]
    out = tmp_path / "resumed" / "cells.h5ad"
    counted = run_to_the_end(lambda n: run_stage(corpus["model"], cells, out, n), out, killed_after)
    assert N_BLOCKS <= counted < N_BLOCKS + BLOCKS_SAVED * len(killed_after)
    assert_equal(out, whole)
    assert {path.name for path in out.parent.iterdir()} == {out.name, "cells.counted"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("nothing", None),
        ("cells", "changed: input"),
        ("options", "changed: options"),
        ("model", "changed: model"),
        ("state", "damaged"),
        ("numbers", "damaged"),
        ("vectors", "damaged"),
    ],
)
def test_vectors_of_other_inputs_are_not_resumed(
    corpus: dict[str, Path],
    tmp_path: Path,
    whole: Path,
    changed: str,
    reason: str | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cells = tmp_path / "cells.h5ad"
    shutil.copy(corpus["cells"], cells)
    model = tmp_path / "model"
    shutil.copytree(corpus["model"], model)
    out = tmp_path / "out" / "cells.h5ad"
    assert run_stage(model, cells, out, 7) is None
    state = out.with_name(".cells.h5ad.partial.embedded")
    [vectors] = out.parent.glob(".cells.h5ad.partial.vectors-*")
    budget = 1 << 30
    if changed == "cells":
        os.utime(cells)
    elif changed == "options":
        budget -= 1
    elif changed == "model":
        config = model / "config.json"
        config.write_text(config.read_text() + "\n")
    elif changed == "state":
        state.write_bytes(state.read_bytes()[:-9])
    elif changed == "numbers":
        state.write_bytes(state.read_bytes()[:-1] + b"\x55")
    elif changed == "vectors":
        vectors.write_bytes(vectors.read_bytes()[: 6 * BLOCK * 16 * 4 - 1])
    capfd.readouterr()
    rest = run_stage(model, cells, out, budget=budget)
    lines = capfd.readouterr()
    line = f"{out}: what a killed process saved is not used ({reason}); the work begins again\n"
    if reason is None:
        assert rest == N_BLOCKS - 6
        assert lines.out.startswith("cells: 192 cells are embedded already\n")
        assert lines.err == ""
    else:
        assert rest == N_BLOCKS
        assert lines.err == line
    assert_equal(out, whole)
    assert {path.name for path in out.parent.iterdir()} == {out.name, "cells.counted"}


def test_two_embeddings_of_one_output_do_not_disturb_each_other(
    corpus: dict[str, Path], tmp_path: Path, whole: Path
) -> None:
    model = corpus["model"]
    out = tmp_path / "cells.h5ad"
    assert run_stage(model, corpus["cells"], out, 4) is None
    run_two(count, model, corpus["cells"], out, NEVER, 1 << 30)
    assert_equal(out, whole)
    assert {path.name for path in out.parent.iterdir()} == {out.name, "cells.counted"}


def test_an_error_of_the_input_leaves_nothing_saved(
    corpus: dict[str, Path], simulated: Path, tmp_path: Path
) -> None:
    """It would come again."""
    cells = tmp_path / "cells.h5ad"
    data = ad.read_h5ad(simulated)
    data.X = data.X.astype(np.float32)
    data.X.data[-1] = -1
    data.write_h5ad(cells)
    out = tmp_path / "out" / "cells.h5ad"
    assert run_stage(corpus["model"], cells, out, 7) is None
    options = EmbedOptions.model_validate({"embed": {}})
    with pytest.raises(DataError, match="is negative"):
        stage.embed(options=options, model=corpus["model"], input=cells, counts="X", out=out)
    assert not [*out.parent.iterdir()]


@pytest.mark.parametrize("first", [0, 32, 224, 600])
def test_rows_from_a_later_one_are_those_of_the_whole_file(
    corpus: dict[str, Path], simulated: Path, first: int
) -> None:
    for path in (corpus["cells"], simulated):
        with open_counts(path) as reader:
            whole = [row for block in reader.rows(BLOCK) for row in block.toarray()]
            rest = [row for block in reader.rows(BLOCK, first) for row in block.toarray()]
        assert len(rest) == len(whole) - first
        assert all((row == other).all() for row, other in zip(rest, whole[first:]))
