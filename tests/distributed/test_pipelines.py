"""Pipelines beside the promises of `test_conformance`: few padded lengths, each made ready once; resumes to the bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.config.parallel import pipeline_tokens
from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

STEPS = 20
# 60 to 250 tokens in a micro-batch: lengths of 64, 128, 192 and 256
CHANGING: dict[str, Any] = {"steps": STEPS, "val_every_steps": 7}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B x FULL_SHARD": {"pp": 2, "microbatches": 6, "sharding_strategy": "FULL_SHARD"},
    "ZBV x tp 2": {"pp": 2, "microbatches": 6, "schedule": "ZBV", "tp": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_length_that_comes_again_needs_no_new_schedule_and_changes_no_number(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: str
) -> None:
    model = {"layers": 4}
    expected = cases.curve(corpus, options(model=model, train=CHANGING), str(tmp_path / "one"), STEPS)
    staged = options(LAYOUTS[layout], model=model, train=CHANGING)
    found = pool.run("counted", corpus=corpus, options=staged, folder=str(tmp_path / "pp"), steps=STEPS)
    for of_rank in found:
        np.testing.assert_allclose(of_rank["curve"][:10], expected[:10], atol=5e-6, rtol=5e-6)
        np.testing.assert_allclose(of_rank["curve"], expected, rtol=5e-5)  # rounding grows with the steps
        built, used = of_rank["built"], of_rank["used"]
        assert len(used) == STEPS
        assert len(built) == len(set(built)) == len(set(used))
        changes = sum(a != b for a, b in pairwise(used))
        assert changes + 1 > len(built), "no length came again after another one: the case tests nothing"
        assert of_rank["with_buffers"] <= 1, "schedules that are not in use keep memory"


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_padded_lengths_are_few_and_near(multiple: int) -> None:
    padded = np.array([pipeline_tokens(tokens, multiple) for tokens in range(1, 70_000, 7)])
    tokens = np.arange(1, 70_000, 7)
    assert (padded >= tokens).all()
    assert (padded % (64 * multiple) == 0).all()
    assert (padded - tokens < np.maximum(64 * multiple, tokens / 16 + 1)).all()
    assert all(pipeline_tokens(n, multiple) == n for n in set(padded.tolist())), "a padded length is not padded again"
    assert len(set(padded[(tokens > 32_768) & (tokens <= 65_536)].tolist())) <= 17
