"""Options of optimizers: the contract, and the built-in ones. `train.optimizer` is a name, or a mapping with `name`.

Learning rate, weight decay and the decay rates of AdamW are options of the section `train`, which every optimizer gets.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from cellmill.config.plugin import Plugin


class OptimizerConfig(Plugin):
    """Base of every optimizer's options.

    `implementation` is called with the parameter groups and the section `train`, and returns a `torch.optim.Optimizer`
    (`cellmill.train.optimizer.build_optimizer` has the groups' keys). Its state must start as zeros.
    """

    kind: ClassVar[str] = "optimizer"
    default: ClassVar[str | None] = "adamw"

    state_names: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")
    """State of a parameter in checkpoints: `step` is a float32 scalar, the others have the parameter's shape."""
    matrix_state_names: ClassVar[tuple[str, ...] | None] = None
    """State of a matrix of the blocks, for an optimizer that treats these differently: their groups have `matrices`
    true, and the optimizer itself has to exchange whole matrices (`cellmill.train.muon`)."""
    fused: ClassVar[bool] = False
    """Whether `found_inf`, an attribute set before each step, is read on the device: where it is 1 the step changes
    nothing. For others the host waits at each step. torch's `fused=True` needs a sharding strategy of DTensor."""
    offloaded: ClassVar[str | None] = None
    """`package.module:Class` for `parallel.cpu_offload: optimizer` with its state on the host; None refuses it."""

    name: str

    @property
    def states_per_parameter(self) -> int:
        """Largest number of tensors of a parameter's shape in its state: float32, as the plan counts them."""
        return max(len({*names} - {"step"}) for names in (self.state_names, self.matrix_state_names or ()))

    @model_serializer(mode="wrap")
    def _as_name(self, handler: SerializerFunctionWrapHandler) -> Any:
        """The name alone if there are no other options."""
        options = handler(self)
        return self.name if list(options) == ["name"] else options


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019)."""

    implementation: ClassVar[str] = "cellmill.train.optimizer:adamw"
    fused: ClassVar[bool] = True
    offloaded: ClassVar[str | None] = "cellmill.train.optimizer:OffloadedAdamW"

    name: Literal["adamw"] = "adamw"


class MuonConfig(OptimizerConfig):
    """Orthogonalised momentum for the matrices of the blocks, AdamW for the rest (Jordan et al. 2024)."""

    implementation: ClassVar[str] = "cellmill.train.muon:Muon"
    matrix_state_names: ClassVar[tuple[str, ...] | None] = ("momentum",)
    fused: ClassVar[bool] = True

    name: Literal["muon"] = "muon"


Optimizer = Annotated[
    SerializeAsAny[OptimizerConfig],
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""Options of an optimizer from its name or a mapping."""
