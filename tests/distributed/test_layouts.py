"""How layouts cut a model, what holds in them beside the promises of `test_conformance`, and
compiled layouts.

Gradients are silently wrong where tensor parallel and torch.compile are put together naively, so
norms are compared in every step. Layouts are traced and differentiated by torch (`aot_eager`); the
code of inductor is made in one of them.
"""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cellmill.config.parallel import pipeline_tokens
from tests.checks import quick
from tests.distributed import cases
from tests.distributed.conformance import AXES, LAYOUTS, PIPELINES, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool


@pytest.mark.parametrize("rows", [122, 9, 3])
def test_the_loss_over_a_sharded_vocabulary_equals_torch(pool: Pool, rows: int) -> None:
    shapes = ((rows, 8), (rows,), (7, 8))
    generator = torch.Generator().manual_seed(rows)
    table, bias, states = (torch.randn(shape, generator=generator) for shape in shapes)
    tokens = torch.arange(11) % rows
    answers = torch.arange(7) * 5 % rows
    for tensor in (table, bias, states):
        tensor.requires_grad_()
    embedded = F.embedding(tokens, table)
    loss = F.cross_entropy(F.linear(states + embedded[:7], table, bias), answers, reduction="sum")
    expected = [loss, *torch.autograd.grad(2 * loss, (table, bias, states))]
    numbers = [tensor.detach().numpy() for tensor in (table, bias, states, tokens, answers)]
    for found in pool.run("cut_vocabulary", arrays=numbers):
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5, rtol=1e-5)


def test_hybrid_shard_shards_only_inside_a_node(pool: Pool, corpus: str) -> None:
    for found in pool.run(
        "initial_parameters", corpus=corpus, options=options(LAYOUTS["HYBRID_SHARD"])
    ):
        for name, parameter in found.items():
            assert parameter["mesh"] == [2, 2], name
            assert parameter["placements"] == ["R", "S(0)"], name
            if parameter["full"][0] % 2 == 0:
                assert parameter["local"][0] == parameter["full"][0] // 2, name


@pytest.mark.parametrize(
    "layout", ["tp 4", pytest.param("FULL_SHARD x tp 2", marks=pytest.mark.full)]
)
def test_tensor_parallel_shards_matrices_by_heads(pool: Pool, corpus: str, layout: str) -> None:
    cut = {
        "qkv.weight": 0,
        "qkv.bias": 0,
        "out.weight": 1,
        "up.weight": 0,
        "up.bias": 0,
        "down.weight": 1,
    }
    tp = LAYOUTS[layout]["tp"]
    for found in pool.run("initial_parameters", corpus=corpus, options=options(LAYOUTS[layout])):
        for name, parameter in found.items():
            dim = 0 if name == "gene_embedding.weight" else cut.get(".".join(name.split(".")[2:]))
            if dim is not None:
                assert (parameter["placements"][-1], parameter["mesh"][-1]) == (f"S({dim})", tp), (
                    name
                )
            elif name.endswith((".out.bias", ".down.bias")):
                assert parameter["placements"][-1] == "R", name
            else:
                assert len(parameter["mesh"]) == (0 if tp == 4 else 1), name


@pytest.mark.parametrize(
    "layout", quick(["HYBRID_SHARD", "pp 2, 1F1B x FULL_SHARD"], ["HYBRID_SHARD"])
)
def test_an_epoch_that_leaves_a_rank_without_cells_does_not_hang(
    pool: Pool, corpus: str, tmp_path: Path, layout: str
) -> None:
    # 3 cells a lane and step over some 42: the last batch of an epoch is short
    uneven = options((LAYOUTS | PIPELINES)[layout], model={"layers": 4}, train={"global_batch": 12})
    curves = pool.run("curve", corpus=corpus, options=uneven, folder=str(tmp_path), steps=32)
    assert len(curves[0]) == 32
    assert np.isfinite(curves[0]).all()


def test_every_process_group_of_a_mesh_gets_the_timeout(pool: Pool) -> None:
    for found in pool.run("timeouts", parallel=LAYOUTS["HYBRID_SHARD"], seconds=77.0):
        assert len(found) > 2
        assert set(found) == {77.0}


@pytest.mark.full
def test_a_repeated_length_needs_no_new_schedule(pool: Pool, corpus: str, tmp_path: Path) -> None:
    # 60 to 250 tokens in a micro-batch: lengths of 64, 128, 192 and 256
    staged = options({"pp": 2, "microbatches": 6, "schedule": "ZBV", "tp": 2}, model={"layers": 4})
    for built, used, with_buffers in pool.run(
        "schedules", corpus=corpus, options=staged, folder=str(tmp_path)
    ):
        assert len(used) == 20
        assert len(built) == len(set(built)) == len(set(used))
        changes = sum(a != b for a, b in pairwise(used))
        assert changes + 1 > len(built), (
            "no length came again after another one: the case tests nothing"
        )
        assert with_buffers <= 1, "schedules that are not in use keep memory"


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_padded_lengths_stay_few(multiple: int) -> None:
    padded = np.array([pipeline_tokens(tokens, multiple) for tokens in range(1, 70_000, 7)])
    tokens = np.arange(1, 70_000, 7)
    assert (padded >= tokens).all()
    assert (padded % (64 * multiple) == 0).all()
    assert (padded - tokens < np.maximum(64 * multiple, tokens / 16 + 1)).all()
    assert all(pipeline_tokens(n, multiple) == n for n in set(padded.tolist())), (
        "a padded length is not padded again"
    )
    assert len(set(padded[(tokens > 32_768) & (tokens <= 65_536)].tolist())) <= 17


STEPS = 4
COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, AXES["ddp"]),
    "tp, recomputed": (2, AXES["tp"] | {"activation_checkpointing": "full"}),
    **{name: (4, LAYOUTS[name]) for name in ("HYBRID_SHARD", TP)},
    "pp 2 Interleaved1F1B": (4, PIPELINES["pp 2, Interleaved1F1B x FULL_SHARD"]),
}
"""Processes and layouts: as few as cut what a graph has of each."""
# 4 blocks for 4 stages; validation, so that the code without dropout is compiled too
RUN: dict[str, Any] = {"model": {"layers": 4}, "train": {"val_every_steps": 2}}


@pytest.fixture(scope="module")
def reference(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(**RUN), str(tmp_path_factory.mktemp("one")), STEPS))


@pytest.mark.full
@pytest.mark.parametrize("layout", COMPILED)
def test_compiled_layouts_train_the_model_of_one_process(
    pools: Callable[[int], Pool],
    corpus: str,
    reference: np.ndarray,
    tmp_path: Path,
    layout: str,
) -> None:
    ranks, parallel = COMPILED[layout]
    opts = options(parallel | {"compile": True}, **RUN)
    found = pools(ranks).run(
        "curve_compiled",
        corpus=corpus,
        options=opts,
        folder=str(tmp_path),
        steps=STEPS,
        backend="aot_eager",
    )
    for curve, graphs in found:
        assert graphs > 0
        np.testing.assert_allclose(np.array(curve), reference, atol=5e-6, rtol=5e-6)


@pytest.mark.full
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
def test_inductor_code_trains_the_same_model_with_dropout(
    alone: None, corpus: str, reference: np.ndarray, tmp_path: Path
) -> None:
    opts = options({"compile": True}, **RUN)
    curve, graphs = cases.curve_compiled(corpus, opts, str(tmp_path), STEPS, "inductor")
    assert 2 <= graphs <= 8, "blocks alike must share their code"
    np.testing.assert_allclose(np.array(curve), reference, atol=5e-6, rtol=5e-6)
