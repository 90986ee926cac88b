"""Steps that are computed twice: a wrong bit is found and its rank named, and no number changes."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cellmill.config.checks import check_together
from cellmill.errors import UserError
from cellmill.parallel.mesh import to_local
from cellmill.parallel.replay import deterministic, sum_bits
from cellmill.train.loop import Trainer
from tests.checks import quick, refused
from tests.distributed import cases
from tests.distributed.command import Run
from tests.distributed.conformance import (
    ENCODER,
    LAYOUTS,
    MORE,
    PROFILE,
    QUERY,
    SIZES,
    VICREG,
)
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.models import split, train_options

EVERY = {"replay_every_steps": 2}
OFFLOADED = "FULL_SHARD, on the CPU"
NAMES = ["ddp", "FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"]
SPREAD = {name: LAYOUTS[name] for name in NAMES} | {OFFLOADED: MORE[OFFLOADED]}


def flipped(tensor: Tensor) -> Tensor:
    """A copy with the lowest bit of one number flipped."""
    bits = tensor.detach().clone().contiguous().view(torch.int32)
    bits.view(-1)[len(bits) // 2] ^= 1
    return tensor + (bits.view(torch.float32) - tensor).detach()


def replayed(
    corpus: str,
    options: dict[str, Any],
    folder: str,
    steps: int,
    every: int | None = 2,
    plant: tuple[list[int], str, int] | None = None,
    load: bool = False,
) -> tuple[list[list[float]], str]:
    """The curve of a training that replays steps, and its error; with `load` from a checkpoint on.

    `plant` is ranks, a place and a step: in the first computation of that step, one bit of these
    ranks flips in the output of block 0 (`output`, or `rows` in the pass that collects rows), in
    the gradient of its weight (`gradient`), or in that gradient after its reduction (`reduced`).
    """
    tree = options | {"train": options["train"] | {"replay_every_steps": every}}
    made, lines = cases.trainer(corpus, tree, folder, steps, load=load)
    if plant is not None and int(os.environ["RANK"]) in plant[0]:
        plant_bit(made, *plant[1:])
    error = ""
    try:
        made.run()
    except UserError as ended:
        error = str(ended)
    finally:
        made.checkpoints.wait()
        made.close()
    return cases.losses_and_norms(lines), error


def plant_bit(made: Trainer, place: str, step: int) -> None:
    block = made.model.blocks[0]
    name = "_with_shares" if place == "rows" else "forward_backward"
    owner = made if place == "rows" else made.parallel_model
    compute = getattr(owner, name)
    computations = 0
    is_first = False
    spoiled = set[int]()

    def counted(*arguments: Any) -> Any:
        nonlocal computations, is_first
        computations += made.progress.step + 1 == step
        is_first = computations == 1
        result = compute(*arguments)
        if is_first and place == "reduced":
            gradient = to_local(block.up.weight.grad)
            gradient.copy_(flipped(gradient))
        is_first = False
        return result

    def spoil_output(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        return flipped(output) if is_first else None

    def spoil_gradient(module: Any, inputs: Any) -> None:
        weight = block.up.weight  # in the block that of FSDP2, which has gathered it
        if is_first and id(weight) not in spoiled:
            spoiled.add(id(weight))
            weight.register_hook(lambda gradient: flipped(gradient) if is_first else None)

    setattr(owner, name, counted)
    if place in ("output", "rows"):
        block.register_forward_hook(spoil_output)
    if place == "gradient":
        made.model.register_forward_pre_hook(spoil_gradient)
        block.register_forward_pre_hook(spoil_gradient)


@pytest.fixture
def run(pools: Callable[[int], Pool], corpus: str, tmp_path: Path) -> Callable[..., Any]:
    """`replayed` on two processes."""
    return partial(pools(2).run, "test_replay.replayed", corpus=corpus, folder=str(tmp_path))


def tree(layout: str, family: dict[str, Any] = ENCODER, **train: Any) -> dict[str, Any]:
    """Options of a run with several micro-batches a step."""
    return options(SPREAD[layout], train={"token_budget": 256} | train) | split(family)


FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": ENCODER,
    "profile": PROFILE | QUERY,
    "autoregressive": {"family": "autoregressive", "objective": "next_gene"} | SIZES,
    "views": ENCODER | VICREG,
}
UNDISTURBED = [("encoder", layout) for layout in SPREAD]
UNDISTURBED += [("views", "ddp"), ("views", "FULL_SHARD")]
UNDISTURBED += [("profile", "ddp"), ("autoregressive", "FULL_SHARD")]
FEW = [("encoder", "ddp"), ("views", "FULL_SHARD")]


@pytest.mark.parametrize(("family", "layout"), quick(UNDISTURBED, FEW))
def test_replays_leave_the_curve_equal_to_the_bit(
    run: Callable[..., Any], family: str, layout: str
) -> None:
    each = {"options": tree(layout, FAMILIES[family]), "steps": 10}
    once = run(every=None, **each)
    assert [len(curve) for curve, _ in once] == [10, 10]
    assert run(**each) == once


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "recompute"),
    [("16-mixed", "selective"), ("bf16-mixed", "full"), ("32-true", "full")],
)
def test_replays_leave_other_kernels_equal_to_the_bit(
    run: Callable[..., Any], precision: str, recompute: str
) -> None:
    given = tree("FULL_SHARD", ema_decay=0.9)
    given["parallel"] = SPREAD["FULL_SHARD"] | {"precision": precision}
    given["parallel"] |= {"activation_checkpointing": recompute}
    assert run(options=given, steps=10) == run(options=given, steps=10, every=None)


UNCHECKED = "steps after 2 were not compared, so later checkpoints may be wrong"
TWICE = "step 4, computed twice from the same state (train.replay_every_steps)"
PLACES = {
    "output": "the output of blocks.0",
    "rows": "the output of blocks.0",
    "gradient": "the gradient of blocks.0.up.weight",
}
PLANTED = [(place, layout) for place in PLACES for layout in ("ddp", "FULL_SHARD", OFFLOADED)]
CHOSEN = [
    ("output", "FULL_SHARD"),
    ("rows", "ddp"),
    ("gradient", "ddp"),
    ("gradient", "FULL_SHARD"),
]


@pytest.mark.parametrize(("place", "layout"), quick(PLANTED, CHOSEN))
def test_a_wrong_bit_of_a_rank_is_found_and_named(
    run: Callable[..., Any], place: str, layout: str
) -> None:
    family = ENCODER | VICREG if place == "rows" else ENCODER
    each = {"options": tree(layout, family), "steps": 6}
    line = f"rank 1 on {os.uname().nodename}: its CPU failed {TWICE}: {PLACES[place]} differs; {UNCHECKED}"
    assert [error for _, error in run(plant=([1], place, 4), **each)] == [line, line]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "HYBRID_SHARD"])
def test_a_wrong_bit_is_found_among_two_nodes(
    pool: Pool, corpus: str, tmp_path: Path, layout: str
) -> None:
    each = {"corpus": corpus, "options": tree(layout), "folder": str(tmp_path), "steps": 6}
    once = pool.run("test_replay.replayed", every=None, **each)
    assert pool.run("test_replay.replayed", **each) == once
    found = pool.run("test_replay.replayed", plant=([3], "gradient", 4), **each)
    line = f"rank 3 on {os.uname().nodename}: its CPU failed {TWICE}: {PLACES['gradient']} differs; {UNCHECKED}"
    assert [error for _, error in found] == [line] * 4
    # a step that is not replayed shows nothing
    found = pool.run("test_replay.replayed", plant=([3], "gradient", 3), **each)
    assert [error for _, error in found] == [""] * 4


def test_a_gradient_that_its_reduction_changed_blames_no_rank(
    run: Callable[..., Any],
) -> None:
    line = (
        f"{TWICE}: the gradient of blocks.0.up.weight after its reduction differs, though no rank's part does: test "
        f"the network between the nodes; {UNCHECKED}"
    )
    for layout in ("ddp", "FULL_SHARD"):
        found = run(options=tree(layout), steps=6, plant=([0], "reduced", 4))
        assert [error for _, error in found] == [line, line]


def test_a_difference_on_most_ranks_blames_none_of_them(run: Callable[..., Any]) -> None:
    found = run(options=tree("ddp"), steps=6, plant=([0, 1], "output", 4))
    line = (
        f"{TWICE}, differs on 2 of 2 ranks, on rank 0 on {os.uname().nodename} in the output of blocks.0: either a "
        f"part of the model is not deterministic, or these ranks share a fault; {UNCHECKED}"
    )
    assert [error for _, error in found] == [line, line]


def test_the_next_attempt_has_the_curve_of_an_undisturbed_run(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    each = {
        "options": tree("FULL_SHARD", checkpoint_every_steps=2, schedule="constant"),
        "steps": 6,
    }
    whole = run(**each | {"folder": str(tmp_path / "whole")})
    assert run(plant=([1], "gradient", 4), **each)[0][1].startswith("rank 1 on ")
    resumed = run(load=True, **each)
    assert [error for _, error in resumed] == ["", ""]
    assert [curve for curve, _ in resumed] == [curve[2:] for curve, _ in whole]


PLANT = """
import os

if os.environ.get("RANK") == "1":
    from cellmill.models.blocks import Block
    from cellmill.parallel.step import ParallelModel

    compute, after = ParallelModel.forward_backward, Block.after
    calls = 0

    def counted(*arguments):
        global calls
        calls += 1
        return compute(*arguments)

    def spoiled(*arguments):
        # one computation of steps 1 and 3, two of step 2: the fifth is the first of step 4
        return after(*arguments) * (1 + 2**-20 * (calls == 5))

    ParallelModel.forward_backward, Block.after = counted, spoiled
"""


@pytest.mark.full
def test_a_training_ends_with_the_line_and_resumes(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"checkpoint_every_steps": 2, "replay_every_steps": 2}
    given = options(SPREAD["ddp"], train=train)
    whole = Run(corpus, tmp_path / "whole")
    whole.train(given, nproc_per_node=2)
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    broken = Run(corpus, tmp_path / "broken")
    with monkeypatch.context() as planted:
        planted.setenv("PYTHONPATH", str(tmp_path))
        out, error = broken.train(given, nproc_per_node=2, max_restarts=2, code=2)
    who = f"cellmill train: rank 1 on {os.uname().nodename}: its CPU failed"
    assert error.splitlines()[-1].startswith(f"{who} {TWICE}: the output of blocks.0 differs; ")
    assert "starting all again" not in out, "the GPU would be used again"
    broken.none_left()
    assert "going on from step 2\n" in broken.train(given, nproc_per_node=2)[0]
    assert broken.losses == whole.losses


def test_operations_without_a_deterministic_algorithm_are_named() -> None:
    with (
        refused(
            "train.replay_every_steps: put_ has no deterministic implementation; set it to null",
            UserError,
        ),
        deterministic(),
    ):
        torch.ones(3).put_(torch.tensor([0]), torch.tensor([2.0]))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_that_is_not_deterministic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with (
        refused(
            "train.replay_every_steps requires CUBLAS_WORKSPACE_CONFIG=:4096:8, got :0:0; unset it in the job's "
            "environment",
            UserError,
        ),
        deterministic(),
    ):
        raise RuntimeError("not deterministic: set CUBLAS_WORKSPACE_CONFIG=:4096:8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_checksums_add_the_patterns_of_all_bits(dtype: torch.dtype) -> None:
    values = torch.randn(64, 9, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    raw = values.contiguous().view(torch.uint8).numpy().tobytes()
    patterns = np.frombuffer(raw, f"i{values.element_size()}")
    assert sum_bits(values).item() % 2**64 == sum(patterns.tolist()) % 2**64
    assert sum_bits(torch.tensor(0.0)) != sum_bits(torch.tensor(-0.0))
    assert sum_bits(torch.tensor([float("nan")])) == sum_bits(torch.tensor([float("nan")]))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_layouts_that_share_activations_are_refused(axis: str) -> None:
    sizes = {"pp": 1, "tp": 1} | {axis: 2}
    line = (
        "train.replay_every_steps requires pp 1 and tp 1, since ranks that exchange activations share errors, got "
        f"pp {sizes['pp']} and tp {sizes['tp']}; set it to null"
    )
    with refused(line):
        check_together(train_options(parallel={axis: 2}, train={"steps": 1} | EVERY))
