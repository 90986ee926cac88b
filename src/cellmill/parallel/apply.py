"""Every transform that lays a model out over a mesh, in the one order that is correct.

    pipeline -> tensor parallel -> freeze -> compile -> recompute -> FSDP2

- pipeline first: modules of other stages are dropped before anything shards or wraps them;
- tensor parallel before freeze: sharded modules re-create parameters with requires_grad=True;
- freeze before FSDP2 and compile, which record what requires a gradient;
- compile before recompute: the recomputed block runs the compiled methods, tensor-parallel collectives included;
- FSDP2 last: its hooks gather weights outside of the recomputed block, for both forward passes.

DistributedDataParallel wraps the result in `parallel.step`, after the parameters have values.
Gradients are *summed* over data-parallel ranks, never averaged: the loss is divided by the global
number of targets before the backward pass, which is exact however unevenly targets fall on ranks.

Tensor parallel shards modules over the mesh axis `tp`, by the names and styles of a family's plan.
Between two sharded matrices activations are replicated, or with sequence parallel sharded by
tokens, whose number is then divisible by tp (`models.batch.pad_batch`). Modules take and return plain
tensors; parameters and buffers of sharded modules are DTensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cellmill.config.parallel import Parallel, Style
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import Mesh, keep_stage
from cellmill.parallel.torch_private import CheckpointImpl, checkpoint_wrapper, operator_name

COMPUTE_DTYPE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""dtype of forward and backward by `parallel.precision`; with float32 nothing is cast."""
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "mkldnn::_linear_pointwise",
        "torch_attn::_varlen_attn",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""Operators whose outputs `selective` keeps, by name: not every build of torch has all of them."""
BACKEND = "inductor"


def apply_fsdp(model: nn.Module, blocks: str, parallel: Parallel, mesh: Mesh) -> None:
    """Apply FSDP2 to each block of the ModuleList `blocks`, then to the root, in place.

    A single data-parallel rank stays unwrapped. So does strategy ddp, except with tensor or
    pipeline parallel: DistributedDataParallel takes no DTensors, and FSDP2 that shards nothing
    replaces it.
    """
    if mesh.dp_world == 1 or (parallel.strategy == "ddp" and mesh.model_parallel_size == 1):
        return
    policy = MixedPrecisionPolicy()
    offload = OffloadPolicy()
    if parallel.half_precision:
        policy = MixedPrecisionPolicy(
            param_dtype=COMPUTE_DTYPE[parallel.precision], reduce_dtype=torch.float32
        )
    if parallel.cpu_offload == "full":
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    shard = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    for block in cast(nn.ModuleList, model.get_submodule(blocks)):
        shard(block, reshard_after_forward=parallel.reshards_after_forward)
    # the backward pass begins with the root's parameters; its inputs are cast where they are read,
    # since a batch has counts and targets too, which must stay exact
    shard(model, reshard_after_forward=False, mp_policy=replace(policy, cast_forward_inputs=False))
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # a plain sum: neither gloo nor NCCL's algorithms on switches (NVLS, SHARP) have PREMUL_SUM
        module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free full weights that a forward without a backward left gathered. No communication."""
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def checkpoint_activations(
    model: nn.Module, blocks: str, how: Literal["full", "selective"] = "full"
) -> None:
    """Wrap each block of the ModuleList `blocks` in activation checkpointing, in place.

    Plain names do not change. `full` keeps only the input of a block (Chen et al. 2016).
    `selective` also keeps the outputs of its matmuls and of attention (Korthikanti et al. 2022,
    section 5), but not of batched matmuls: they are attention without a fused kernel, whose scores
    grow with the square of a cell's length.
    """

    def policy(ctx: object, op: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator_name(op) in KEPT:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    modules = cast(nn.ModuleList, model.get_submodule(blocks))
    context: dict[str, Any] = {}
    if how == "selective":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for name, block in modules.named_children():
        # no RNG state to keep: dropout is keyed by position, so recomputation reproduces it
        wrapped = checkpoint_wrapper(
            block, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **context
        )
        modules.register_module(name, wrapped)


def compile_blocks(model: nn.Module, blocks: str, methods: Sequence[str]) -> None:
    """Compile `methods` of each block in place, for any number of tokens.

    Each variant is compiled when it first runs. Attention stays eager: it has its own kernels, and
    cell lengths, which are Python integers, would recompile for each batch. Methods are compiled,
    not modules, so names of parameters do not change, and hooks of FSDP2 and recomputation run
    around the compiled code.
    """
    modules = list(cast(nn.ModuleList, model.get_submodule(blocks)))
    # torch counts variants over all blocks, which share their code; tensor-parallel hooks differ
    # between blocks
    variants = 8 * len(modules)
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, variants)
    accumulated = len(methods) * variants
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, accumulated)
    for block in modules:
        for name in methods:
            method = getattr(block, name)
            compiled = torch.compile(method, dynamic=True, fullgraph=True, backend=BACKEND)
            setattr(block, name, compiled)


def apply_tensor_parallel(
    model: nn.Module, styles: Mapping[str, Style], parallel: Parallel, mesh: Mesh
) -> None:
    """Shard the modules in `styles` (`*` is any block) over axis `tp`, in place."""
    if parallel.tp == 1:
        return
    share = Shard(0)
    whole = Replicate()
    by_style: dict[Style, ParallelStyle] = {
        "columns": ColwiseParallel(),
        "rows": RowwiseParallel(),
    }
    if parallel.sequence_parallel:
        by_style = {
            "columns": ColwiseParallel(input_layouts=share),
            "rows": RowwiseParallel(output_layouts=share),
            "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
            "enter": PrepareModuleOutput(output_layouts=(whole,), desired_output_layouts=(share,)),
            "leave": PrepareModuleInput(
                input_layouts=(share,), desired_input_layouts=(whole,), use_local_output=True
            ),
        }
    by_style["vocabulary"] = _Vocabulary()
    children = dict(model.named_children())  # a pipeline stage lacks some
    plan = {}
    for name, style in styles.items():
        if style in by_style and name.split(".")[0] in children:
            plan[name] = by_style[style]
    parallelize_module(model, mesh.devices["tp"], plan, src_data_rank=None)


class _Vocabulary(ParallelStyle):
    """Row-sharded embedding, read through `parallel.vocab_parallel`.

    DTensor's lookup gives a full gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard_rows(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(sharded))

        return distribute_module(module, device_mesh, shard_rows)


def parallelize(
    model: nn.Module,
    parallel: Parallel,
    mesh: Mesh,
    *,
    stage: int = 0,
    trains: Callable[[str], bool] | None = None,
) -> None:
    """Lay out a whole `Model` by its `plan`, in place, and keep pipeline stage `stage`.

    Parameters that `trains` rejects by plain name are frozen.
    """
    plan: Any = model.plan
    if parallel.pp > 1:
        keep_stage(model, stage, parallel.n_stages)
    apply_tensor_parallel(model, plan.tensor, parallel, mesh)
    if trains is not None:
        freeze(model, trains)
    if parallel.compile:
        compile_blocks(model, plan.blocks, plan.compiled)
    if parallel.activation_checkpointing is not None:
        checkpoint_activations(model, plan.blocks, parallel.activation_checkpointing)
    apply_fsdp(model, plan.blocks, parallel, mesh)


def freeze(model: nn.Module, trains: Callable[[str], bool]) -> None:
    """Turn off the gradient of every parameter that `trains` rejects by its plain name."""
    for name, parameter in model.named_parameters():
        if not trains(plain_name(name)):
            parameter.requires_grad_(False)
