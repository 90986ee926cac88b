"""Idle time and kept micro-batches agree with torch's own schedule tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from cellmill.config.parallel import Parallel
from cellmill.parallel.pipeline import SCHEDULES
from cellmill.parallel.stages import stages_of
from cellmill.planner.memory import idle_frac, kept_micro_batches

SECONDS = {"FORWARD": 1.0, "FULL_BACKWARD": 2.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0}
KEPT = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
# torch's table of 1F1B is not what it runs: it keeps one micro-batch too many
TABLED = ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]


@pytest.fixture
def pp(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "times", "pp"),
    [
        pytest.param(schedule, times, pp, marks=() if (times, pp) == pair else pytest.mark.full)
        for schedule, pair in zip(TABLED, [(1, 2), (2, 4), (1, 4), (2, 2), (2, 4)])
        for times in (1, 2)
        for pp in (2, 4)
    ],
    indirect=["pp"],
)
def test_idle_time_and_kept_micro_batches_agree_with_the_schedule_table(pp: int, schedule: str, times: int) -> None:
    parallel = Parallel(pp=pp, schedule=schedule)  # type: ignore[arg-type]
    micro_batches = times * parallel.stages
    table = _table(parallel, micro_batches)
    busy = 3.0 * micro_batches * parallel.stages / pp
    assert idle_frac(parallel, micro_batches) == pytest.approx(1 - busy / _play(table, parallel), abs=1e-9)
    most = [_most_kept(actions) for actions in table]
    planned = [kept_micro_batches(parallel, rank, micro_batches) for rank in range(pp)]
    assert planned == most


def test_idle_time_is_zero_without_a_pipeline_and_known_for_1f1b() -> None:
    assert idle_frac(Parallel(), 5) == 0
    assert idle_frac(Parallel(pp=4), 8) == pytest.approx(3 / 11)
    assert [kept_micro_batches(Parallel(pp=4), rank, 8) for rank in range(4)] == [4, 3, 2, 1]


def _table(parallel: Parallel, micro_batches: int) -> list[list[Any]]:
    """Actions (stage_index, computation_type, microbatch_index) of each process, in order."""
    cpu = torch.device("cpu")
    stages = [PipelineStage(nn.Identity(), n, parallel.stages, cpu) for n in stages_of(0, parallel)]
    kind: Any = get_schedule_class(SCHEDULES.get(parallel.schedule, parallel.schedule))
    made = kind(stages if len(stages) > 1 else stages[0], n_microbatches=micro_batches, loss_fn=lambda a, b: a)
    order = made.pipeline_order
    return [
        [part for action in order[rank] if action for part in [action.sub_actions or (action,)]]
        for rank in range(parallel.pp)
    ]


def _play(table: list[list[Any]], parallel: Parallel) -> float:
    """Return when the last process finishes, if each action waits for its inputs."""
    done: dict[tuple[bool, int, int], float] = {}
    clocks, at = [0.0] * len(table), [0] * len(table)
    while any(next_action < len(actions) for next_action, actions in zip(at, table)):
        before = list(at)
        for rank, actions in enumerate(table):
            while at[rank] < len(actions):
                parts = [part for part in actions[at[rank]] if part.computation_type.name in SECONDS]
                needs = [need for part in parts for need in _needs(part, parallel)]
                if any(need not in done for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] += sum(SECONDS[part.computation_type.name] for part in parts)
                for part in parts:
                    if part.computation_type.name != "BACKWARD_WEIGHT":
                        forward = part.computation_type.name == "FORWARD"
                        done[forward, part.stage_index, part.microbatch_index] = clocks[rank]
                at[rank] += 1
        assert at != before, "deadlock"
    return max(clocks)


def _needs(part: Any, parallel: Parallel) -> list[tuple[bool, int, int]]:
    stage, micro_batch = part.stage_index, part.microbatch_index
    if part.computation_type.name == "FORWARD":
        return [(True, stage - 1, micro_batch)] if stage else []
    last = stage == parallel.stages - 1
    return [] if last or part.computation_type.name == "BACKWARD_WEIGHT" else [(False, stage + 1, micro_batch)]


def _most_kept(actions: list[Any]) -> int:
    kept = most = 0
    for parts in actions:
        for part in parts:
            kept += KEPT.get(part.computation_type.name, 0)
            most = max(most, kept)
    return most
