#!/usr/bin/env bash
# accelerate 1.15.0: the last update of an epoch has too small a gradient if its batches are fewer than are accumulated.
#
# `backward` divides each loss by `gradient_accumulation_steps`. At the end of the loader `accumulate` updates early, with the batches
# that are there, whose losses were divided by the full number all the same. So a remainder of one batch of four counts a
# quarter, in every epoch, and the norm that is clipped or logged is as small. An epoch shorter than the number scales every
# update of the training. Nothing warns. Dividing by the remainder, or dropping it, is up to the program.
#
# Seen, batches with a gradient of 1, four accumulated, gradient at each update: 8 batches: 1, 1; 6: 1, .5; 5: 1, .25; 2: .5.
# Source: our own run, CPU; Lightning's issue 19987 reports the same of Lightning. Guess before it: the mean of the batches of the
# update, 1 each time.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0
export HF_HOME="$folder/hf"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def gradients(batches):
    """Gradient at each update of an epoch, 3 samples a batch, whose loss is the weight times 1."""
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    weight = torch.nn.Linear(1, 1, bias=False)
    loader = DataLoader(TensorDataset(torch.ones(3 * batches, 1)), batch_size=3)
    model, optimizer, loader = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.1), loader)
    seen = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                seen.append(round(weight.weight.grad.item(), 6))
            optimizer.step()
            optimizer.zero_grad()
    return seen


print("accelerate", version("accelerate"), "torch", version("torch"))
found = {batches: gradients(batches) for batches in (8, 6, 5, 2)}
for batches, seen in found.items():
    print(f"{batches} batches, four accumulated: gradients {seen}")
assert found == {8: [1, 1], 6: [1, 0.5], 5: [1, 0.25], 2: [0.5]}
PYTHON
