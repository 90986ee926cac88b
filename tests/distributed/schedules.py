"""A training in a pipeline that counts its schedules, for `test_pipeline_schedules`."""

from __future__ import annotations

from typing import Any

from cellmill.parallel.pipeline import PipelineModel
from tests.distributed import cases


def counted(corpus: str, options: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """[loss, gradient norm] of each step, schedules that torch made, and each step's micro-batches and tokens."""
    made, lines = cases.trainer(corpus, options, folder, steps)
    model = made.parallel_model
    assert isinstance(model, PipelineModel)
    new, use = model.schedules._make, model.schedules.of
    built: list[tuple[int, int]] = []
    used: list[tuple[int, int]] = []
    model.schedules._make = lambda *key: built.append(key) or new(*key)  # type: ignore[func-returns-value]
    model.schedules.of = lambda *key: used.append(key) or use(*key)  # type: ignore[method-assign, func-returns-value]
    made.run()
    with_buffers = sum(next(kept._received(), None) is not None for kept in model.schedules._made.values())
    made.close()
    return {"curve": cases.losses_and_norms(lines), "built": built, "used": used, "with_buffers": with_buffers}
