"""Compiled layouts have the loss, gradient norm and dropout of one uncompiled process.

Gradients are silently wrong where tensor parallel and torch.compile are put together naively, so norms are compared in
every step. Layouts are traced and differentiated by torch (`aot_eager`); the code of inductor is made in one of them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.conformance import AXES, LAYOUTS, PIPELINES, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

STEPS = 4
COMPILED: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("ddp", "HYBRID_SHARD", TP)},
    "tp 4, sequence parallel, recomputed": LAYOUTS["tp 4, sequence parallel"] | {"activation_checkpointing": "full"},
    "pp 2 Interleaved1F1B": PIPELINES["pp 2, Interleaved1F1B x FULL_SHARD"],
}
ON_TWO = "tp"  # sequence parallel
# 4 blocks for 4 stages; validation, so that the code without dropout is compiled too
RUN: dict[str, Any] = {"model": {"layers": 4}, "train": {"val_every_steps": 2}}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(**RUN), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "ranks"), [(ON_TWO, 2), *((name, 4) for name in COMPILED)])
def test_compiled_layouts_train_the_model_of_one_process(
    pools: Callable[[int], Pool], corpus: str, reference: np.ndarray, tmp_path: Path, layout: str, ranks: int
) -> None:
    opts = options((AXES if ranks == 2 else COMPILED)[layout] | {"compile": True}, **RUN)
    found = pools(ranks).run(
        "curve_compiled", corpus=corpus, options=opts, folder=str(tmp_path), steps=STEPS, backend="aot_eager"
    )
    for curve, graphs in found:
        assert graphs > 0
        np.testing.assert_allclose(np.array(curve), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.full
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_inductor_code_trains_the_same_model_with_dropout(
    alone: None, corpus: str, reference: np.ndarray, tmp_path: Path
) -> None:
    opts = options({"compile": True}, **RUN)
    curve, graphs = cases.curve_compiled(corpus, opts, str(tmp_path), STEPS, "inductor")
    assert 2 <= graphs <= 8, "blocks alike must share their code"
    np.testing.assert_allclose(np.array(curve), reference, atol=5e-6, rtol=5e-6)
