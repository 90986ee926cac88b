"""torch.compile of what a family names in its blocks: norms, activations, dropout and sums become few kernels.

Attention stays outside: it has kernels of its own, and the lengths of cells, which Python knows, would compile anew for
each batch. What is compiled is a method, not a module: names stay, hooks of FSDP2 and recomputation run around it, and
the next process group's collectives of tensor parallel are traced into it. Applied after tensor parallel and before
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

BACKEND = "inductor"


def compile_blocks(model: nn.Module, blocks: str, methods: Sequence[str]) -> None:
    """Compiles `methods` of each block of the ModuleList called `blocks`, for any number of tokens. In place.

    Nothing is compiled before the first step, and then again for what differs: evaluation, no tokens at all.
    """
    modules = list(cast(nn.ModuleList, model.get_submodule(blocks)))
    # torch counts variants over all blocks, whose code is one; hooks of tensor parallel are different in each
    variants = 8 * len(modules)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, variants)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, len(methods) * variants
    )
    for block in modules:
        for name in methods:
            whole = torch.compile(getattr(block, name), dynamic=True, fullgraph=True, backend=BACKEND)
            setattr(block, name, whole)
