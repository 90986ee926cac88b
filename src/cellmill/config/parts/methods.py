"""Options of fine-tuning methods and of optimizers: their contracts, and the built-in ones.

`train.lr` is the rate of an objective's heads; methods set the rate of the trunk, the rest of the
model, as a fraction. `train.optimizer` is a name, or a mapping with `name`; learning rate, weight
decay and the decay rates of AdamW are options of the section `train`, which every optimizer gets.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema, model_serializer

from cellmill.config.plugin import Plugin
from cellmill.config.section import Names


class MethodConfig(Plugin):
    """Base of every fine-tuning method's options; `implementation` is a
    `cellmill.finetune.method.Method`.
    """

    kind = "method"
    key = "method"
    default = "full"

    method: str
    new_genes: Literal["random", "mean"] = "random"
    """Initial rows, in embeddings and heads, of corpus genes that the model of init_from lacks:
    random, or the mean of those it has. With model.gene_vectors they also get their vectors of the
    file, which is the model's.
    """
    min_known_frac: float = Field(0.01, ge=0, le=1)
    """Minimum fraction of a cell's expressed genes that the model of init_from has; below it
    training is refused.
    """
    leave_out: Names = Field([])
    """Modules and parameters of the model of init_from that this run's model lacks on purpose, such
    as covariates. Training is refused if it lacks others that are not of another objective.
    """


class FullConfig(MethodConfig):
    """Train every parameter of the unchanged model."""

    implementation = "cellmill.finetune.method:Full"
    method: Literal["full"] = "full"
    trunk_lr_frac: float = Field(1.0, gt=0)
    """Learning rate of the trunk, all but the objective's heads, as a fraction of train.lr, the
    rate of the heads.
    """
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Factor of the learning rate from each block to the previous one: of N blocks, block i from 0
    has layer_decay ** (N - 1 - i), embeddings have layer_decay ** N. 1 is one rate for the whole
    trunk.
    """
    head_steps: int = Field(0, ge=0)
    """Number of initial optimizer steps that train only the heads."""
    block_steps: int = Field(0, ge=0)
    """Steps between unfreezing a block and the block before it; the last block, with the norm after
    it, starts after head_steps, and the embeddings start after the first block. 0: all start after
    head_steps.
    """


class HeadOnlyConfig(MethodConfig):
    """Train the objective's heads; the trunk is frozen."""

    implementation = "cellmill.finetune.method:HeadOnly"
    method: Literal["head_only"] = "head_only"


class PartialConfig(MethodConfig):
    """Train the last blocks, the norm after them and the objective's heads; the rest is frozen."""

    implementation = "cellmill.finetune.method:Partial"
    method: Literal["partial"] = "partial"
    last_blocks: int = Field(4, ge=1)
    """Number of last blocks that train."""
    trunk_lr_frac: float = Field(0.01, gt=0)
    """Learning rate of these blocks as a fraction of train.lr."""


class LoraConfig(MethodConfig):
    """Train low-rank adapters of the blocks' linear layers (Hu et al. 2022), and the objective's
    heads. The adapters are merged into the exported model, and also stored beside it in the layout
    of the package peft.
    """

    implementation = "cellmill.finetune.lora:Lora"
    method: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' product is multiplied by alpha / rank."""
    targets: list[str] | None = Field(None, min_length=1)
    """Names of the linear layers in a block, such as qkv; null adapts every linear layer of the
    blocks.
    """
    trunk_lr_frac: float = Field(0.1, gt=0)
    """Learning rate of the adapters as a fraction of train.lr."""


class OptimizerConfig(Plugin):
    """Base of every optimizer's options.

    `implementation` is called with the parameter groups and the section `train`, and returns a
    `torch.optim.Optimizer` (`cellmill.train.optimizer.build_optimizer` has the groups' keys). Its
    state must start as zeros.
    """

    kind = "optimizer"
    default = "adamw"

    state_names: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")
    """State of a parameter in checkpoints: `step` is a float32 scalar, the others have the
    parameter's shape.
    """
    matrix_state_names: ClassVar[tuple[str, ...] | None] = None
    """State of a matrix of the blocks, for an optimizer that treats these differently: their groups
    have `matrices` true, and the optimizer itself has to exchange whole matrices
    (`cellmill.train.muon`).
    """
    fused: ClassVar[bool] = False
    """Whether `found_inf`, an attribute set before each step, is read on the device: where it is 1
    the step changes nothing. For others the host waits at each step. torch's `fused=True` needs a
    sharding strategy of DTensor.
    """
    offloaded: ClassVar[str | None] = None
    """`package.module:Class` for `parallel.cpu_offload: optimizer` with its state on the host; None
    refuses it.
    """

    name: str

    @property
    def states_per_parameter(self) -> int:
        """Largest number of tensors of a parameter's shape in its state: float32, as the plan
        counts them.
        """
        return max(
            len({*names} - {"step"}) for names in (self.state_names, self.matrix_state_names or ())
        )

    def count_step_copies(self, sharded: bool) -> int:
        """Number of float32 copies of a rank's shard of all matrices of the blocks that a step
        allocates, as the plan counts them. `sharded` is True if several ranks share a matrix.
        """
        return 0

    @model_serializer(mode="wrap")
    def _as_name(self, handler: Any) -> Any:
        """The name alone if there are no other options."""
        options = handler(self)
        return self.name if list(options) == ["name"] else options


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019)."""

    implementation = "cellmill.train.optimizer:adamw"
    fused = True
    offloaded = "cellmill.train.optimizer:OffloadedAdamW"
    name: Literal["adamw"] = "adamw"


class MuonConfig(OptimizerConfig):
    """Orthogonalised momentum for the matrices of the blocks, AdamW for the rest (Jordan et al.
    2024).
    """

    implementation = "cellmill.train.muon:Muon"
    matrix_state_names = ("momentum",)
    fused = True
    name: Literal["muon"] = "muon"

    def count_step_copies(self, sharded: bool) -> int:
        # momenta, Nesterov's and updates; and the buffers of both exchanges and whole matrices
        return 7 if sharded else 3


Optimizer = Annotated[
    SerializeAsAny[OptimizerConfig],
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""Options of an optimizer from its name or a mapping."""
