"""Activations that the backward pass makes again, block by block, for memory.

`full` keeps what enters a block. `selective` also keeps what is dear to make, the products of its matrices and its
attention, and makes again what is cheap: norms, GELU, dropout, sums, casts, and what tensor-parallel processes put
together for a product. Batched products are made again too: they are attention where no kernel of its own takes it,
and their scores are the square of a cell's length.

Source: Chen et al. 2016 (sublinear memory); Korthikanti et al. 2022, section 5 (selective).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "mkldnn::_linear_pointwise",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
"""What `selective` keeps, by the operator's name: not every build of torch has each."""


def checkpoint_activations(model: nn.Module, blocks: str, how: Literal["full", "selective"] = "full") -> None:
    """Makes each block of the ModuleList called `blocks` recompute its activations. In place; names stay the same."""
    modules = cast(nn.ModuleList, model.get_submodule(blocks))
    chosen = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if how == "selective" else {}
    for name, block in modules.named_children():
        # no RNG state to keep: dropout is keyed by position, so recomputation is exact without it
        wrapped = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **chosen)
        modules.register_module(name, wrapped)


def _policy(ctx: object, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = getattr(op, "_schema", None) is not None and op._schema.name in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
