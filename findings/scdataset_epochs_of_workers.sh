#!/usr/bin/env bash
# scDataset 0.3.0 with workers of a DataLoader reads the cells of every epoch in the order of the first one.
#
# The dataset counts its epochs where it is iterated, and draws the order from seed and epoch. With `num_workers` above 0 that is
# a worker, whose copy ends with the epoch: the next worker starts at epoch 0 again. There is no `set_epoch`. BlockShuffling, and
# the draws of weighted sampling, so are those of one epoch for the whole training, and weighted cells that were not drawn once
# are never seen. Without workers, or with persistent_workers=True, epochs differ.
#
# Seen, 64 cells, blocks of 4, three epochs: no workers and persistent ones: three orders; two workers: one order. Draws of
# 64 of 64 cells with replacement, ten epochs: 64 cells are seen without workers, 39 with two.
# Source: our own run. Guess before it: each epoch has an order of its own, with and without workers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scdataset==0.3.0 torch==2.13.0
cat > "$folder/script.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
from scdataset import BlockShuffling, BlockWeightedSampling, scDataset
from torch.utils.data import DataLoader

CELLS = np.arange(64)


def epochs(strategy, n, workers, persistent):
    """Cells of each of n epochs, in order."""
    dataset = scDataset(CELLS, strategy, batch_size=8, fetch_factor=2, seed=0)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)
    return [tuple(np.concatenate([*map(np.asarray, loader)]).tolist()) for _ in range(n)]


if __name__ == "__main__":
    print("scdataset", version("scdataset"), "torch", version("torch"))
    orders, seen = {}, {}
    for workers, persistent in ((0, False), (2, False), (2, True)):
        read = epochs(BlockShuffling(block_size=4), 3, workers, persistent)
        assert all(sorted(epoch) == CELLS.tolist() for epoch in read)
        orders[workers, persistent] = len(set(read))
        drawn = epochs(BlockWeightedSampling(block_size=4), 10, workers, persistent)
        seen[workers, persistent] = len({cell for epoch in drawn for cell in epoch})
        print(f"{workers} workers, persistent {persistent}: {orders[workers, persistent]} orders in 3 epochs;", end=" ")
        print(f"weighted: {seen[workers, persistent]} of 64 cells in 10 epochs")
    assert orders == {(0, False): 3, (2, False): 1, (2, True): 3}
    assert seen == {(0, False): 64, (2, False): 39, (2, True): 64}
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py"
