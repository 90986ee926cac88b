"""torch.compile of the block methods that a family names: norms, activations, dropout and additions are fused.

Attention stays eager: it has its own kernels, and cell lengths, which are Python integers, would recompile for each
batch. Methods are compiled, not modules: parameter names do not change, hooks of FSDP2 and recomputation run around
the compiled code, and tensor-parallel collectives are traced into it.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

BACKEND = "inductor"


def compile_blocks(model: nn.Module, blocks: str, methods: Sequence[str]) -> None:
    """Compile `methods` of each block of the ModuleList `blocks`, for any number of tokens. In place.

    Compilation starts at the first step, and again for each variant: evaluation, an empty batch.
    """
    modules = list(cast(nn.ModuleList, model.get_submodule(blocks)))
    # torch counts variants over all blocks, which share their code; tensor-parallel hooks differ between blocks
    variants = 8 * len(modules)
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, variants)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, len(methods) * variants)
    for block in modules:
        for name in methods:
            compiled = torch.compile(getattr(block, name), dynamic=True, fullgraph=True, backend=BACKEND)
            setattr(block, name, compiled)
