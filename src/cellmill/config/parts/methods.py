"""Options of fine-tuning methods: the contract, and the built-in ones.

`train.lr` is the rate of an objective's heads; methods set the rate of the trunk, the rest of the model, as a fraction.
"""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.plugin import Plugin


class MethodConfig(Plugin):
    """Base of every fine-tuning method's options; `implementation` is a `cellmill.finetune.method.Method`."""

    kind: ClassVar[str] = "method"
    key: ClassVar[str] = "method"
    default: ClassVar[str | None] = "full"

    method: str
    new_genes: Literal["random", "mean"] = "random"
    """Initial rows, in embeddings and heads, of corpus genes that the model of init_from lacks: random, as in a new
    model, or the mean over the genes it has. With model.gene_vectors such genes also get their own vector, if the file
    has one (the same file as that of the model)."""
    min_known_frac: float = Field(0.01, ge=0, le=1)
    """Minimum fraction of a cell's expressed genes that the model of init_from has; below it training is refused."""


class FullConfig(MethodConfig):
    """Train every parameter of the unchanged model."""

    implementation: ClassVar[str] = "cellmill.finetune.method:Full"

    method: Literal["full"] = "full"
    trunk_lr_frac: float = Field(1.0, gt=0)
    """Learning rate of the trunk, all but the objective's heads, as a fraction of train.lr, the rate of the heads."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Factor of the learning rate from each block to the previous one: of N blocks, block i from 0 has layer_decay **
    (N - 1 - i), embeddings have layer_decay ** N. 1 is one rate for the whole trunk."""
    head_steps: int = Field(0, ge=0, description="Number of initial optimizer steps that train only the heads.")
    block_steps: int = Field(0, ge=0)
    """Steps between unfreezing a block and the block before it; the last block, with the norm after it, starts after
    head_steps, and the embeddings start after the first block. 0: all start after head_steps."""


class HeadOnlyConfig(MethodConfig):
    """Train the objective's heads; the trunk is frozen."""

    implementation: ClassVar[str] = "cellmill.finetune.method:HeadOnly"

    method: Literal["head_only"] = "head_only"


class PartialConfig(MethodConfig):
    """Train the last blocks, the norm after them and the objective's heads; the rest is frozen."""

    implementation: ClassVar[str] = "cellmill.finetune.method:Partial"

    method: Literal["partial"] = "partial"
    last_blocks: int = Field(4, ge=1, description="Number of last blocks that train.")
    trunk_lr_frac: float = Field(0.01, gt=0, description="Learning rate of these blocks as a fraction of train.lr.")


class LoraConfig(MethodConfig):
    """Train low-rank adapters of the blocks' linear layers (Hu et al. 2022), and the objective's heads. The adapters
    are merged into the exported model, and also stored beside it in the layout of the package peft."""

    implementation: ClassVar[str] = "cellmill.finetune.lora:Lora"

    method: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(16.0, gt=0, description="The adapters' product is multiplied by alpha / rank.")
    targets: list[str] | None = Field(None, min_length=1)
    """Names of the linear layers in a block, such as qkv; null adapts every linear layer of the blocks."""
    trunk_lr_frac: float = Field(0.1, gt=0, description="Learning rate of the adapters as a fraction of train.lr.")
