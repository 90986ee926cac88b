"""Words of scModelForge, Molfun, AxonML and PyTorch Lightning for options of ours, for messages."""

KEYS = {
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "min_lr": "train.min_lr_frac, a fraction of train.lr",
    "batch_size": "train.global_batch, cells of a step over all processes",
    "accumulate_grad_batches": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "gradient_accumulation_steps": "train.global_batch and train.token_budget, which cut a step into micro-batches",
    "gradient_clip": "train.clip_norm",
    "grad_clip": "train.clip_norm",
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
    "lora_rank": "finetune.rank",
    "lora_alpha": "finetune.alpha",
    "target_modules": "finetune.targets",
}
"""The option that does it here, as `set` takes it."""

VALUES = {
    "zero-1": "SHARD_GRAD_OP",
    "zero-2": "SHARD_GRAD_OP",
    "zero-3": "FULL_SHARD",
    "interleaved": "Interleaved1F1B",
    "cosine_warmup": "cosine",
    "adam": "adamw",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}
"""The value that does it here, of an option that has it."""


def value_here(value: object, message: str) -> str:
    """Hint for a value of another tool, if `message` lists the one that does it here; else empty."""
    here = VALUES.get(str(value).lower())
    return f"; {value} is {here} here" if here is not None and repr(here) in message else ""
