"""Counter-based random numbers are pure functions of their keys."""

import numpy as np
import torch

from cellmill.models.counter_rng import host_state, keyed_bits, keyed_dropout, keyed_state, keyed_token_bits, threshold

WORD = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One step, from the constants of the paper, in Python's unbounded integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_bits_are_splitmix64_folded_over_the_keys() -> None:
    assert _splitmix64(0) == 0xE220A8397B1DCDAF, "the published first number"
    keys = [0, 1, 2**31, 2**63 - 1, -1, -(2**63)]
    found = keyed_bits(torch.tensor(keys), 7, -1).tolist()
    expected = [_splitmix64(_splitmix64(_splitmix64(key & WORD) ^ 7) ^ WORD) >> 1 for key in keys]
    assert found == expected
    assert (host_state(np.array(keys), 7, -1) >> np.uint64(1)).tolist() == expected


def test_bits_of_tokens_are_those_of_all_their_keys() -> None:
    cells, cell, place = torch.tensor([2**40, -3, 9]), torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 0, 0, 1])
    assert torch.equal(keyed_token_bits(cells, cell, 5, -1, place, 3), keyed_bits(cells[cell], 5, -1, place, 3))


def test_a_share_of_the_bits_lies_below_the_threshold() -> None:
    draws = keyed_bits(torch.arange(100_000), 1)
    for share in (0.0, 0.15, 0.5, 1.0):
        assert abs((draws < threshold(share)).double().mean().item() - share) < 0.005


def test_dropout_depends_on_token_layer_and_column_but_not_on_the_batch() -> None:
    keys = keyed_bits(torch.arange(64), 9)
    x = torch.ones(64, 32)
    states = keyed_state(keys, 3)
    whole = keyed_dropout(x, 0.25, states)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_dropout(x[order], 0.25, states[order]), whole[order])
    assert torch.equal(keyed_dropout(x[5:9], 0.25, states[5:9]), whole[5:9])
    assert not torch.equal(keyed_dropout(x, 0.25, keyed_state(keys, 4)), whole)
    assert whole.unique().tolist() == [0.0, torch.tensor(1 / 0.75).item()]
    assert abs((whole == 0).double().mean().item() - 0.25) < 0.03
