#!/usr/bin/env bash
# torch 2.13.0: an AveragedModel of bfloat16 weights with an exponential average stays at its first values, however long it runs.
#
# The average is kept in the dtype of the model. Each update adds (1 - decay) * difference, and bfloat16 has steps of 1/128
# between 1 and 2: a smaller change is rounded away, every time again. So the averaged model that is saved or evaluated is that of
# the first update, without a warning. A decay of .9 stops before its end. In float32 the same average arrives.
#
# Seen, weights 1 at the first update and 1.2 at 20,000 more: decay .999 and .99 in bfloat16: 1; .9: 1.1719; decay .999 in
# float32: 1.1999.
# Source: our own run, CPU. Guess before it: near 1.2, with the error of bfloat16.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

print("torch", torch.__version__)
torch.set_num_threads(1)


def average(dtype, decay):
    """Mean weight of the average after 20,000 updates by weights of 1.2."""
    model = torch.nn.Linear(2, 2, bias=False).to(dtype)
    model.weight.data.fill_(1.0)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    averaged.update_parameters(model)
    model.weight.data.fill_(1.2)
    for _ in range(20_000):
        averaged.update_parameters(model)
    return round(averaged.module.weight.double().mean().item(), 4)


found = {}
for dtype, decay in ((torch.bfloat16, 0.999), (torch.bfloat16, 0.99), (torch.bfloat16, 0.9), (torch.float32, 0.999)):
    found[dtype, decay] = average(dtype, decay)
    print(f"{dtype}, decay {decay}: {found[dtype, decay]}")
assert found[torch.bfloat16, 0.999] == found[torch.bfloat16, 0.99] == 1
assert found[torch.bfloat16, 0.9] < 1.19 < found[torch.float32, 0.999]
PYTHON
