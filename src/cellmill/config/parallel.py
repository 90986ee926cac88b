"""Section `parallel`: the parallel layout of a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cellmill.config.section import Section


class Parallel(Section):
    """Layout of the model over processes; the profile sets how many processes there are."""

    strategy: Literal["ddp", "fsdp"] = Field("fsdp", description="DistributedDataParallel or FSDP2.")
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "HYBRID_SHARD",
        description="What fsdp shards: parameters, gradients and optimizer over all processes (FULL_SHARD, ZeRO-3); "
        "the same with parameters kept gathered between forward and backward (SHARD_GRAD_OP, ZeRO-2); the same as "
        "FULL_SHARD inside groups of shard_size, replicated across groups (HYBRID_SHARD); or nothing. Ignored by ddp.",
    )
    shard_size: int | None = Field(
        None,
        ge=1,
        description="Processes in one HYBRID_SHARD group; null is the processes of one node, divided by tp.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Tensor-parallel size: processes that share every matrix and the same cells; best inside a node.",
    )
    sequence_parallel: bool = Field(
        False,
        description="Tensor-parallel processes also split the tokens between matrix multiplications, to save memory.",
    )
    pp: int = Field(
        1,
        ge=1,
        description="Pipeline-parallel size: processes that each hold some of the blocks; best between nodes.",
    )
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"] = Field(
        "1F1B",
        description="Pipeline schedule; the last four have two pipeline stages per process.",
    )
    microbatches: int | None = Field(
        None,
        ge=1,
        description="Minimum number of micro-batches per step in a pipeline; more of them leave less idle time. null "
        "is twice the pipeline stages. train.token_budget may require more.",
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = Field(
        "32-true",
        description="Number format of forward and backward. 16-mixed is for GPUs without bfloat16: it scales the loss "
        "and skips steps whose gradients overflow.",
    )
    activation_checkpointing: Literal["full", "selective"] | None = Field(
        None,
        description="full recomputes each block in the backward pass, to save memory; selective recomputes everything "
        "except matrix multiplications and attention; null keeps all activations.",
    )
    compile: bool = Field(
        False,
        description="torch.compile of each block, attention excluded: faster on a GPU after minutes of compilation, "
        "with less memory than planned. Needs a C++ compiler on the training machine.",
    )
    cpu_offload: Literal["full", "optimizer"] | None = Field(
        None,
        description="What is kept in host memory. optimizer: AdamW's moments, and its step runs on the CPU. full: also "
        "parameters and gradients, which needs strategy fsdp and at least two data-parallel processes.",
    )

    @property
    def low(self) -> bool:
        """True if forward and backward use a 16-bit format."""
        return self.precision != "32-true"

    @property
    def reshards_after_forward(self) -> bool:
        """True if FSDP2 frees a block's gathered weights after its forward pass and gathers them again.

        Not in a pipeline, which needs a stage's weights for many micro-batches at a time.
        """
        return self.strategy == "fsdp" and self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.pp == 1

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * (1 if self.pp == 1 or self.schedule in ("GPipe", "1F1B") else 2)
