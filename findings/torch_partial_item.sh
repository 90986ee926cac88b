#!/usr/bin/env bash
# torch 2.13.0: `.item()` of a sum or mean over a sharded DTensor covers this process's shard only.
#
# Reductions over a sharded dim give a DTensor with placement Partial, whose processes have not been combined yet.
# `full_tensor()` combines them. `item()` reads the local part instead, without a warning, so each process logs another loss
# or norm, and a condition on `(x < limit).all().item()` takes different branches. Where an operation needs the whole tensor,
# the value is complete: std is right where mean is not, and the square of the norm where the norm is not.
#
# Seen, 1 to 10 sharded over two processes, item() of rank 0, of rank 1 and the value: sum 15, 40, 55; mean 3, 8, 5.5;
# max 5, 10, 10; norm 7.4, 18.2, 19.6; square of the norm 385, 385, 385; std 3.03 three times; (x < 6).all() True, False, False.
# Source: our own run, gloo. Guess before it: item() of any DTensor is that of full_tensor().
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/script.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import spawn

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "square of the norm": lambda x: torch.linalg.vector_norm(x) ** 2,
    "std": lambda x: x.std(),
    "(x < 6).all()": lambda x: (x < 6).all(),
}


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    numbers = distribute_tensor(torch.arange(1.0, 11), init_device_mesh("cpu", (2,)), [Shard(0)])
    found = {}
    for name, reduce in REDUCTIONS.items():
        reduced = reduce(numbers)
        local = [None, None]
        dist.all_gather_object(local, reduced.item())
        found[name] = (*local, reduced.full_tensor().item())
        if rank == 0:
            print(f"{name}: rank 0 {local[0]}, rank 1 {local[1]}, value {found[name][2]}, {reduced.placements}")
    dist.destroy_process_group()
    assert found["sum"] == (15, 40, 55)
    assert found["mean"] == (3, 8, 5.5)
    assert found["max"] == (5, 10, 10)
    assert found["norm"][0] < 8 < 18 < found["norm"][1] < 19 < found["norm"][2]
    assert len(set(found["square of the norm"])) == len(set(found["std"])) == 1
    assert found["(x < 6).all()"] == (True, False, False)


if __name__ == "__main__":
    print("torch", torch.__version__)
    spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/script.py" "$folder"
