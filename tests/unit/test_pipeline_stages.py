"""Assignment of blocks to pipeline stages, and micro-batches of a step."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cellmill.config.parallel import Parallel, min_microbatches
from cellmill.data.stream.micro_batches import split_evenly, split_greedily
from cellmill.models.build import build
from cellmill.parallel.mesh import keep_stage, list_blocks, list_stages, tied_parameters
from tests.models import spec


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pp": 4}, [[0], [1], [2], [3]]),
        ({"pp": 2, "schedule": "Interleaved1F1B"}, [[0, 2], [1, 3]]),
        ({"pp": 3, "schedule": "ZBV"}, [[0, 5], [1, 4], [2, 3]]),
        ({"pp": 2, "schedule": "DualPipeV"}, [[0, 3], [1, 2]]),
        ({}, [[0]]),
    ],
)
def test_each_stage_is_in_one_process(options: dict[str, Any], expected: list[list[int]]) -> None:
    parallel = Parallel.model_validate(options)
    assert len(expected) == parallel.pp
    for rank, stages in enumerate(expected):
        assert list_stages(rank, parallel) == stages


@pytest.mark.parametrize(("stages", "blocks"), [(1, 3), (2, 2), (2, 3), (4, 6), (4, 7), (8, 61)])
def test_blocks_are_assigned_evenly_in_order(stages: int, blocks: int) -> None:
    assigned: list[int] = []
    sizes = []
    for stage in range(stages):
        blocks_of_stage = list_blocks(stage, stages, blocks)
        assigned += blocks_of_stage
        sizes.append(len(blocks_of_stage))
    assert assigned == list(range(blocks))
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes), "the first stage also has the embedding"


@pytest.mark.parametrize("objective", ["masked_value", "masked_gene"])
@pytest.mark.parametrize("cell_loss_weight", [0.0, 1.0])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_together_are_the_model(
    objective: Any, cell_loss_weight: float, stages: int
) -> None:
    config = spec(30, layers=4, hidden=16, objective=objective, cell_loss_weight=cell_loss_weight)
    whole = dict(build(config).named_parameters())
    stages_by_name: dict[str, list[int]] = {}
    for stage in range(stages):
        part = build(config)
        keep_stage(part, stage, stages)
        for name, parameter in part.named_parameters():
            assert parameter.shape == whole[name].shape
            stages_by_name.setdefault(name, []).append(stage)
    assert stages_by_name.keys() == whole.keys()
    tied = set(tied_parameters(part))
    for name, found_in in stages_by_name.items():
        if name in tied:
            assert found_in == [0, stages - 1]
        else:
            assert len(found_in) == 1
    reads_embedding = objective == "masked_gene" or cell_loss_weight > 0
    assert bool(tied) == reads_embedding


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"pp": 4}, 8),
        ({"pp": 4, "microbatches": 2}, 4),
        ({"pp": 4, "microbatches": 9}, 12),
        ({"pp": 2, "schedule": "ZBV"}, 8),
        ({"pp": 3, "schedule": "DualPipeV", "microbatches": 4}, 6),
    ],
)
def test_a_step_has_enough_micro_batches_to_fill_a_pipeline(
    options: dict[str, Any], expected: int
) -> None:
    assert min_microbatches(Parallel.model_validate(options)) == expected


def test_even_micro_batches_are_as_small_as_their_number_allows() -> None:
    for lengths, most, borders in (
        ([4, 4, 4, 4], 2, [0, 2, 4]),
        ([9, 1, 1, 1, 1, 1], 2, [0, 1, 6]),
        ([3, 3], 5, [0, 1, 2]),  # no cell is cut
        ([], 3, [0]),
    ):
        assert split_evenly(np.array(lengths, int), most) == borders


def test_no_smaller_micro_batch_would_do() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        n_cells = generator.integers(1, 30)
        lengths = generator.integers(1, 100, n_cells)
        most = int(generator.integers(1, 9))
        borders = split_evenly(lengths, most)
        assert borders[0] == 0
        assert borders[-1] == n_cells
        assert len(borders) - 1 <= most
        sizes = [int(lengths[start:end].sum()) for start, end in pairwise(borders)]
        largest = max(sizes)
        if largest > lengths.max():
            smaller = split_greedily(lengths, largest - 1)
            assert len(smaller) - 1 > most
