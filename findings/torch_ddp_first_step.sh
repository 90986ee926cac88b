#!/usr/bin/env bash
# torch 2.13.0: DistributedDataParallel adds the gradients of a process's first step in another order than those of all later steps.
#
# After its first backward pass DDP lays its buckets out anew, in the order in which gradients arrived. A gradient then lies at another
# place of the ring that sums it, so with three or more processes the same weights and the same batch give other last bits in the
# first step than in the second. A training that is stopped and started again has such a first step once more: even with every
# state saved and deterministic algorithms, its curve is not that of the uninterrupted one to the bit. With two
# processes a + b is b + a, so a test on two sees nothing. find_unused_parameters=True keeps the first layout.
#
# Seen, gloo, CPU, one batch, no optimizer: three processes: gradients of step 1 differ from step 0, and step 2 equals step 1; two
# processes, or find_unused_parameters=True: all equal.
# Source: our own run, and Reducer::should_rebuild_buckets in torch/csrc/distributed/c10d/reducer.hpp. Guess before it: every step
# of the same weights and batch has the same gradients.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/script.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel


def run(rank, world_size, unused, folder):
    store = f"file://{folder}/store-{world_size}-{unused}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh()) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=unused)
    batch = torch.randn(world_size, 16, 40)[rank]
    steps = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().sum().backward()
        steps.append([parameter.grad.clone() for parameter in model.parameters()])
    unequal = [sum(not torch.equal(a, b) for a, b in zip(steps[i], steps[i + 1])) for i in (0, 1)]
    if rank == 0:
        print(f"{world_size} processes, find_unused_parameters={unused}: {unequal[0]} of {len(steps[0])} gradients differ "
              f"between steps 0 and 1, {unequal[1]} between steps 1 and 2", flush=True)
    assert unequal[1] == 0
    assert (unequal[0] > 0) == (world_size == 3 and not unused)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    for world_size, unused in ((3, False), (2, False), (3, True)):
        spawn(run, (world_size, unused, sys.argv[1]), nprocs=world_size)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/script.py" "$folder"
