"""Number formats outside of training steps: embeddings and tasks in bfloat16, and TF32. All of it
on a CPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

from cellmill.config.checks import check_together
from cellmill.config.parallel import Parallel
from cellmill.config.parts.tasks import ReconstructConfig
from cellmill.errors import ConfigError
from cellmill.evaluate.features.cell_features import compute_features, embed_counts
from cellmill.evaluate.methods import EMBEDDING
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.reconstruct import Reconstruct
from cellmill.parallel.mesh import set_tf32
from cellmill.planner.devices import DEVICES, check_precision
from tests.models import train_options
from tests.unit.evaluated import embed


def near_and_not_equal(rounded: np.ndarray, exact: np.ndarray) -> None:
    """bfloat16 keeps 8 bits: errors of a percent, and not of nothing."""
    assert rounded.dtype == exact.dtype == np.float32
    assert np.isfinite(rounded).all()
    scale = np.abs(exact).mean()
    assert 1e-5 * scale < np.abs(rounded - exact).mean() < 0.03 * scale


def test_embeddings_in_bfloat16_are_near_those_in_float32(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    vectors = {}
    for precision in ("32-true", "bf16-mixed"):
        out = embed(
            corpus["model"], corpus["cells"], tmp_path / f"{precision}.h5ad", precision=precision
        )
        written = ad.read_h5ad(out)
        assert written.uns["cellmill"]["precision"] == precision
        vectors[precision] = np.asarray(written.obsm["X_cellmill"])  # type: ignore[arg-type]
    near_and_not_equal(vectors["bf16-mixed"], vectors["32-true"])


def test_tasks_run_the_model_in_the_precision_of_evaluate(context: Context) -> None:
    rounded = replace(
        context, options=context.options.model_copy(update={"precision": "bf16-mixed"})
    )
    counts = next(context.reader.rows(64))
    cells = np.arange(64)
    features = [embed_counts(one, cells, counts, one.model.network) for one in (rounded, context)]
    near_and_not_equal(*features)
    assert EMBEDDING in compute_features(rounded, cells, counts)
    mse = [Reconstruct(ReconstructConfig()).run(one).figures["mse"] for one in (rounded, context)]
    assert mse[0] != mse[1]
    assert mse[0] == pytest.approx(mse[1], rel=0.05)


@pytest.fixture
def kept() -> Any:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_for_float32_on_devices_that_have_it(kept: None) -> None:
    torch.set_float32_matmul_precision("highest")
    set_tf32(True, torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
    for enabled, expected in ((True, "high"), (False, "highest")):
        set_tf32(enabled, torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == expected
    tf32 = Parallel(tf32=True)
    assert DEVICES["h100"].peak_flops_per_s(tf32) == 494e12
    for name in ("cpu", "mi300x"):
        check_precision(tf32, name, DEVICES[name])
    with pytest.raises(ConfigError, match="a v100 has no TF32; set it to no"):
        check_precision(tf32, "v100", DEVICES["v100"])
    with pytest.raises(
        ConfigError, match=r"parallel\.tf32 has no effect with precision bf16-mixed; set tf32 to no"
    ):
        check_together(train_options(parallel={"tf32": True, "precision": "bf16-mixed"}))
