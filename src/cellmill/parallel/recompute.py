"""Activation checkpointing: blocks recompute activations in the backward pass to save memory.

`full` keeps only the input of a block. `selective` also keeps the outputs of its matmuls and of attention, and
recomputes what is cheap: norms, GELU, dropout, additions, casts, and tensor-parallel all-gathers. Batched matmuls are
recomputed as well: they are attention without a fused kernel, whose scores grow with the square of a cell's length.

Source: Chen et al. 2016 (sublinear memory); Korthikanti et al. 2022, section 5 (selective).
"""

from functools import partial
from typing import Any, Literal, cast

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cellmill.parallel.torch_private import CheckpointImpl, checkpoint_wrapper, operator_name

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
"""Operators whose outputs `selective` keeps, by name: not every build of torch has all of them."""


def checkpoint_activations(model: nn.Module, blocks: str, how: Literal["full", "selective"] = "full") -> None:
    """Wrap each block of the ModuleList `blocks` in activation checkpointing. In place; plain names do not change."""
    modules = cast(nn.ModuleList, model.get_submodule(blocks))
    context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if how == "selective" else {}
    for name, block in modules.named_children():
        # no RNG state to keep: dropout is keyed by position, so recomputation reproduces it
        wrapped = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **context)
        modules.register_module(name, wrapped)


def _policy(ctx: object, op: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator_name(op) in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
