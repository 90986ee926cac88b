"""Values of tokens by compiled loops are those of numpy, bit for bit, and so are those that a batch gets."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from cellmill.data.stream import tokenizers as module
from cellmill.data.stream.batch import Prefixes
from cellmill.data.stream.tokenizers import Loops, by_loops, by_numpy, compile_loops, log_values

MOST = 700
Cells = tuple[Prefixes, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def loops() -> Loops:
    pytest.importorskip("numba")
    compiled = compile_loops()
    assert compiled is not None
    return compiled


def cells(dtype: type, largest: int, n: int = 100) -> Cells:
    """Cells with and without genes, cut and whole; counts up to `largest`, most of them small."""
    rng = np.random.default_rng(largest)
    lengths = rng.integers(0, 1_400, n) * (rng.random(n) > 0.1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.exp(rng.random(starts[-1]) ** 3 * np.log(largest)).round().clip(1, largest).astype(dtype)
    return Prefixes(starts, MOST), counts, starts


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(np.uint16, 1), (np.uint16, 63), (np.uint16, 64), (np.uint16, 65_535), (np.uint32, 2**32 - 1)],
)
def test_loops_make_the_bits_of_numpy(loops: Loops, dtype: type, largest: int) -> None:
    given = cells(dtype, largest)
    expected, made = by_numpy(*given), by_loops(loops, *given)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made.view(np.uint32), expected.view(np.uint32))


def test_cells_without_counts_have_no_values(loops: Loops) -> None:
    starts = np.zeros(4, np.int64)
    assert len(by_loops(loops, Prefixes(starts, MOST), np.empty(0, np.uint16), starts)) == 0


@pytest.mark.parametrize("installed", [True, False])
def test_a_batch_of_many_tokens_has_the_same_bits_with_and_without_the_loops(
    loops: Loops, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: Future[Loops | None] = Future()
    done.set_result(loops if installed else None)
    monkeypatch.setattr(module, "_compiling", lambda: done)
    kept, counts, starts = cells(np.uint16, 3_000)
    assert len(kept.of(counts)) > module._MANY
    frozen = counts.copy()
    frozen.flags.writeable = False
    for given in (counts, counts.astype(np.int64), frozen):  # types that the loops take, and others
        made = log_values(kept, given, starts)
        np.testing.assert_array_equal(made.view(np.uint32), by_numpy(kept, counts, starts).view(np.uint32))
