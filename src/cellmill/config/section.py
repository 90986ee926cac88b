"""Base class of every configuration section: frozen, no unknown keys, a description for each field.

Snakemake's YAML loads `3e-4` as text, so numbers are accepted as text, and "null" where null is allowed. A boolean is
not accepted as a number. Error messages also recognise the option names of scModelForge, Molfun, AxonML and PyTorch
Lightning, and name ours.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from cellmill.errors import did_you_mean

KEYS = {
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "total_steps": "train.steps",
    "learning_rate": "train.lr",
    "min_lr": "train.min_lr_frac, a fraction of train.lr",
    "batch_size": "train.global_batch, cells of a step over all processes",
    "accumulate_grad_batches": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "accumulate_grad": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "gradient_accumulation": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "gradient_accumulation_steps": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "gradient_clip": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "ema": "train.ema_decay",
    "use_ema": "train.ema_decay",
    "early_stopping": "train.early_stop_patience, in validations",
    "early_stopping_patience": "train.early_stop_patience, in validations",
    "patience": "train.early_stop_patience, in validations",
    "min_delta": "train.early_stop_min_delta",
    "monitor": "train.best_metric",
    "val_check_interval": "train.val_every_steps",
    "eval_every_n_epochs": "train.val_every_steps",
    "log_every_n_steps": "train.log_every_steps",
    "save_every": "train.checkpoint_every_steps",
    "random_seed": "train.seed",
    "scheduler": "train.schedule",
    "lr_scheduler": "train.schedule",
    "warmup": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps",
    "val_split": "shard.val_frac",
    "sampling": "stream.weight_by",
    "save_top_k": "train.keep_checkpoints",
    "num_nodes": "nodes in the profile (set-resources: train)",
    "num_gpus": "nproc_per_node in the profile (set-resources: train)",
    "num_workers": "stream.io_threads",
    "use_amp": "parallel.precision",
    "hidden_dim": "model.hidden",
    "num_layers": "model.layers",
    "num_heads": "model.heads",
    "ffn_dim": "model.ffn_hidden",
    "max_len": "tokens.max_tokens",
    "max_seq_len": "tokens.max_tokens",
    "n_bins": "tokens.bins",
    "max_genes": "tokens.max_tokens",
    "zero_stage": "parallel.sharding_strategy",
    "num_stages": "parallel.pp",
    "pipeline_stages": "parallel.pp",
    "num_microbatches": "parallel.microbatches",
    "tensor_parallel": "parallel.tp",
    "tp_size": "parallel.tp",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "mixed_precision": "parallel.precision",
    "random_replace_ratio": "objective.random_frac",
    "keep_ratio": "objective.keep_frac",
    "loss_fn": "objective.loss",
    "mask_ratio": "objective.mask_frac",
    "layer_lr_decay": "finetune.layer_decay",
    "lr_trunk": "finetune.trunk_lr_frac, a fraction of train.lr",
    "backbone_lr": "finetune.trunk_lr_frac, a fraction of train.lr",
    "lr_lora": "finetune.trunk_lr_frac, a fraction of train.lr",
    "lr_head": "train.lr, the rate of the heads",
    "head_lr": "train.lr, the rate of the heads",
    "unfreeze_last_n": "finetune.last_blocks with finetune.method partial",
    "freeze_backbone": "finetune.method to head_only",
    "freeze_backbone_epochs": "finetune.head_steps, in steps",
    "layer_decay_rate": "finetune.layer_decay",
    "layerwise_lr_decay": "finetune.layer_decay",
    "lora_rank": "finetune.rank",
    "lora_r": "finetune.rank",
    "lora_dropout": "model.dropout: adapters have none of their own",
    "lora_alpha": "finetune.alpha",
    "target_modules": "finetune.targets",
}
"""The option that does it here, as `set` takes it."""

VALUES = {
    "zero-1": "SHARD_GRAD_OP",
    "zero-2": "SHARD_GRAD_OP",
    "zero-3": "FULL_SHARD",
    "zero1": "SHARD_GRAD_OP",
    "zero2": "SHARD_GRAD_OP",
    "zero3": "FULL_SHARD",
    "interleaved": "Interleaved1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "cosine_warmup": "cosine",
    "adam": "adamw",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp32": "32-true",
}
"""The value that does it here, of an option that has it."""


def value_here(value: object, message: str) -> str:
    """Hint for a value of another tool, if `message` lists the one that does it here; else empty."""
    here = VALUES.get(str(value).lower())
    return f"; {value} is {here} here" if here is not None and repr(here) in message else ""


T = TypeVar("T")


def _each_once(values: list[T]) -> list[T]:
    repeated = [value for place, value in enumerate(values) if value in values[:place]]
    if repeated:
        raise ValueError(f"expected each value once, got {repeated[0]} twice; leave one out")
    return values


EachOnce = AfterValidator(_each_once)
"""Annotation of a list that names nothing twice."""


class Section(BaseModel):
    """Options of one section; the fields' descriptions give meaning, unit and default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    moved: ClassVar[dict[str, str]] = {}  # keys that stood here in earlier versions, and where they stand now

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The section as a run or corpus has it: keys of its `own`, then keys of the section at the top."""
        return defaults | own

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("expected a number, got a boolean")
        if value == "null" and type(None) in get_args(annotation):
            return None  # `--config 'train={clip_norm: null}'` of Snakemake
        return value


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], str]:
    """Location and one-line message of the first problem of `error`, raised when validating `model`."""
    errors = error.errors()  # a misspelled key is also a missing one; the misspelled one is what to correct
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        section = _model_at(model, where[:-1])
        return where[:-1], unknown_key(where[-1], section.model_fields, getattr(section, "moved", {}))
    if first["type"] == "missing":
        return where, "is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error" and not isinstance(first["input"], dict):
        message += f", got {_shown(first['input'])}{value_here(first['input'], message)}"
    return where, message[0].lower() + message[1:]


def _shown(value: Any) -> str:
    """A value in at most 100 characters: a cell of a table may have many thousands."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text):,} characters)"


def error_line(where: list[str], message: str) -> str:
    """The line of a message about the option at `where`."""
    return f"{'.'.join(where)}: {message}" if where else message


def unknown_key(key: str, known: Iterable[str], moved: dict[str, str] | None = None) -> str:
    """Message for a key that does not exist: its new place, ours for a word of another tool, or the nearest name."""
    if moved and key in moved:
        return f"{key} has moved; set {moved[key]}"
    if key in KEYS:
        return f"unknown key {key!r}; set {KEYS[key]}"
    return f"unknown key {key!r}; {did_you_mean(key, known)}"


def part_of(annotation: Any) -> Any:
    """Type of the values of a `dict[str, X]`, or the type itself; without pydantic's annotations."""
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _model_at(model: Any, where: list[str]) -> Any:
    for part in where:
        model = get_args(model)[1] if get_origin(model) in (dict, Mapping) else model.model_fields[part].annotation
    return model
