"""translate: a configuration of scModelForge becomes one of cellmill, with a line for each of its keys.

The line begins with *written* (its value is in the new file), *advice* (what to set or do instead) or *dropped* (it had
no effect there, or has no counterpart here).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cellmill.config.load import check_config, read_yaml
from cellmill.errors import ConfigError
from cellmill.files import write_text

SAME = {
    "data.preprocessing.hvg_selection": "vocabulary.max_genes",
    "tokenizer.max_genes": "tokens.max_tokens",
    "tokenizer.masking.mask_ratio": "objective.mask_frac",
    "tokenizer.masking.random_replace_ratio": "objective.random_frac",
    "tokenizer.masking.keep_ratio": "objective.keep_frac",
    "model.hidden_dim": "model.hidden",
    "model.num_layers": "model.layers",
    "model.num_heads": "model.heads",
    "model.ffn_dim": "model.ffn_hidden",
    "model.dropout": "model.dropout",
    "model.pooling": "model.pooling",
    "training.max_epochs": "train.epochs",
    "training.seed": "train.seed",
    "training.strategy": "parallel.strategy",
    "training.optimizer.lr": "train.lr",
    "training.optimizer.weight_decay": "train.weight_decay",
    "training.scheduler.warmup_steps": "train.warmup_steps",
    "training.gradient_clip": "train.clip_norm",
    "training.log_every_n_steps": "train.log_every_steps",
    "training.save_top_k": "train.keep_checkpoints",
    "training.val_split": "shard.val_frac",
}
"""Keys whose value is taken over."""
CHOICES: dict[str, tuple[str, dict[Any, Any]]] = {
    "tokenizer.strategy": (
        "tokens.tokenizer",
        {"rank_value": "rank", "binned_expression": "binned", "continuous_projection": "continuous"},
    ),
    "training.precision": ("parallel.precision", {"bf16-mixed": "bf16-mixed", "16-mixed": "16-mixed", "32": "32-true"}),
    "training.scheduler.name": (
        "train.schedule",
        {"cosine_warmup": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"},
    ),
    "training.optimizer.name": ("train.optimizer", {"adamw": "adamw", "adam": "adamw"}),
    "model.architecture": ("model.family", {"transformer_encoder": "encoder"}),
    "training.fsdp.sharding_strategy": (
        "parallel.sharding_strategy",
        {name: name for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")},
    ),
    "training.fsdp.activation_checkpointing": ("parallel.activation_checkpointing", {"True": "full", "False": None}),
    "training.logger": ("track.to", {name: {name: {}} for name in ("wandb", "tensorboard", "mlflow")}),
}
"""Keys whose values have other names here."""
NO_EFFECT = {
    "data.gene_vocab": "nothing read it; `vocabulary.protein_coding: true` keeps protein-coding genes",
    "tokenizer.gene_vocab": "nothing read it; `vocabulary.protein_coding: true` keeps protein-coding genes",
    "training.scheduler.total_steps": "max_epochs set the length",
    "data.shards": "nothing read it; shards are made by `cellmill shard` here, always",
    "data.multi_species": "nothing read it from a file; `preprocess.reference_organism` maps genes here",
    "data.perturbation.dose_key": "nothing read it; the column `dose` of the table of datasets here",
    "data.perturbation.dose_unit": "nothing read it",
    "model.pretraining_task": "nothing read it; objective.name here",
    "zoo.env_dir": "nothing read it",
    "zoo.timeout": "nothing read it",
}
"""Keys, or sections, that nothing reads there."""
NONE_HERE = {
    "model.activation": "family encoder has GELU",
    "finetune.lora.dropout": "adapters have no dropout, which would depend on the layout",
    "finetune.lora.bias": "biases stay as they are",
    "zoo": "models of others are read by `cellmill import`",
}
"""Keys, or sections, without a counterpart, and what stands here."""
ELSEWHERE = {
    "data.source": "the column `path` of the table: a file, a folder or a URL",
    "data.census": "`cellmill convert census URI --filter CONDITION`, and its file in the table of datasets",
    "data.perturbation": "the columns `perturbation` and `control` of the table of datasets",
    "data.gene_selection": "tokens.max_tokens and tokens.truncation, for each cell",
    "data.cloud": "URLs in the table of datasets; credentials from the environment",
    "data.streaming": "always on: shards are read in blocks",
    "data.streaming_chunk_size": "stream.block_cells",
    "data.streaming_shuffle_buffer": "stream.window_blocks",
    "data.preprocessing.normalize": "counts stay raw; tokenizers normalise",
    "data.preprocessing.target_sum": "counts stay raw; tokenizers normalise to 10,000",
    "data.preprocessing.log1p": "counts stay raw; tokenizers take logarithms",
    "data.max_genes": "tokens.max_tokens, from tokenizer.max_genes",
    "data.num_workers": "stream.io_threads",
    "training.num_workers": "stream.io_threads",
    "training.run_name": "the name under `runs`",
    "training.checkpoint_dir": "results/runs/RUN/train",
    "training.log_dir": "results/runs/RUN/train",
    "training.resume_from": "the same command resumes",
    "tokenizer.prepend_cls": "model.pooling: cls",
    "tokenizer.n_bins": "tokens.bins, of tokenizer binned",
    "tokenizer.binning_method": "tokens.binning, of tokenizer binned",
    "tokenizer.embedding_path": "model.gene_vectors",
    "tokenizer.embedding_dim": "model.gene_vector_dim",
    "training.sampling": "stream.weight_by, weight_exponent, max_repeats and weight_warmup_steps",
    "training.wandb_project": "track.to.wandb.project",
    "training.fsdp.cpu_offload": "parallel.cpu_offload",
    "training.fsdp.min_num_params": "each block is sharded by itself",
    "finetune": "a run of its own with `init_from`, whose section finetune says what trains",
    "finetune.checkpoint_path": "init_from of that run",
    "finetune.freeze_backbone": "finetune.method: head_only of that run",
    "finetune.freeze_backbone_epochs": "finetune.head_steps of that run",
    "finetune.label_key": "objective.label_column, or target_column, of that run",
    "finetune.head": "objective classification or regression of that run",
    "finetune.backbone_lr": "finetune.trunk_lr_frac of that run, a fraction of train.lr",
    "finetune.head_lr": "train.lr of that run",
    "finetune.lora": "finetune.method: lora of that run, with rank, alpha and targets",
    "model.vocab_size": "the corpus's vocabulary",
    "model.n_bins": "tokens.bins",
    "model.gene_loss_weight": "family autoregressive: 1",
    "model.expression_loss_weight": "objective.value_loss_weight, of objective next_gene",
    "model.decoder_dim": "objective.decoder_hidden, of family autoencoder's objectives",
    "model.decoder_layers": "objective.decoder_layers, of objective query_decoding",
    "model.decoder_heads": "objective query_decoding has the heads of the model",
    "model.max_seq_len": "tokens.max_tokens, from tokenizer.max_genes",
    "model.mask_ratio": "objective.mask_frac, from tokenizer.masking",
    "model.pretraining_task": "objective.name",
    "model.use_expression_values": "the tokenizer",
    "eval": "evaluate.tasks; checkpoints are evaluated when a run is done",
}
"""Keys that something else does here."""


DEFAULTS = {
    "tokenizer.max_genes": 2048,
    "tokenizer.strategy": "rank_value",
    "tokenizer.masking.mask_ratio": 0.15,
    "tokenizer.masking.random_replace_ratio": 0.1,
    "tokenizer.masking.keep_ratio": 0.1,
    "model.architecture": "transformer_encoder",
    "model.hidden_dim": 512,
    "model.num_layers": 12,
    "model.num_heads": 8,
    "model.dropout": 0.1,
    "model.pooling": "cls",
    "training.max_epochs": 10,
    "training.seed": 42,
    "training.strategy": "ddp",
    "training.val_split": 0.05,
    "training.precision": "bf16-mixed",
    "training.optimizer.lr": 1e-4,
    "training.optimizer.weight_decay": 0.01,
    "training.scheduler.warmup_steps": 2000,
    "training.gradient_clip": 1.0,
    "training.save_top_k": 3,
}
"""Values there of keys that a file leaves out."""


@dataclass(frozen=True)
class Translation:
    """Result of `translate`."""

    config: dict[str, Any]
    table: str
    """Text of the table of datasets."""
    lines: list[str]
    """For each key of the file, what became of it."""


def translated(tree: Any, table: Path) -> Translation:
    """Return a configuration of a scModelForge YAML, checked, whose table of datasets will be the file `table`.

    Raises ConfigError if it is none, or what became of it is refused here.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("data"), dict) or "model" not in tree:
        raise ConfigError("expected a configuration of scModelForge, with sections data and model")
    config: dict[str, Any] = {"corpora": {"corpus": {"table": str(table)}}}
    given = dict(_leaves(tree))
    for key, value in DEFAULTS.items():
        if key not in given:
            _one(config, key, value)
    answers = {key: _one(config, key, value) for key, value in given.items()}
    if "vocabulary" in config:
        _put(config, "vocabulary.select", "seurat")
    factors = [given.get(f"training.{key}") or default for key, default in _BATCH.items()]
    if wrong := [value for value in factors if type(value) is not int]:
        raise ConfigError(f"training: expected a whole number for {', '.join(_BATCH)}, got {wrong[0]!r}")
    _put(config, "train.global_batch", factors[0] * factors[1] * factors[2])
    product = f"{config['train']['global_batch']} = {' x '.join(map(str, factors))} ({', '.join(_BATCH)})"
    product = f"train.global_batch: {product}"
    answers |= {f"training.{key}": ("written", product) for key in _BATCH if f"training.{key}" in given}
    if "training.num_gpus" in given:
        answers["training.num_gpus"] = ("written", f"{product}; set nproc_per_node in the profile too")
    if config.get("tokens", {}).get("tokenizer") == "binned":
        _put_bins(config, given)
        for key, here in (("n_bins", "bins"), ("binning_method", "binning")):
            if f"tokenizer.{key}" in given:
                answers[f"tokenizer.{key}"] = ("written", f"tokens.{here}: {config['tokens'][here]}")
    if given.get("training.wandb_project") and "wandb" in config.get("track", {}).get("to", {}):
        config["track"]["to"]["wandb"]["project"] = given["training.wandb_project"]
        answers["training.wandb_project"] = ("written", "track.to.wandb.project")
    rank = config.get("tokens", {}).get("tokenizer", "rank") == "rank"
    _put(config, "tokens.tokenizer", config.get("tokens", {}).get("tokenizer", "rank"))
    _put(config, "objective.name", "masked_gene" if rank else "masked_value")
    config["runs"] = {"translated": {"corpus": "corpus"}}
    listed = tree["data"].get("paths") or []
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise ConfigError(f"data.paths: expected a list of paths, got {listed!r}")
    if not listed:
        raise ConfigError("data.paths: expected a list of .h5ad files, got none; add them")
    answers["data.paths"] = ("written", f"column path of {table}")
    lines = [f"{mark:<8} {key}: {text}" for key, (mark, text) in answers.items()]
    paths = [Path(path) for path in listed]
    rows = [f"{path.stem}\t{path}" for path in paths]
    return Translation(config, "\n".join(["dataset\tpath", *rows, ""]), lines)


_BATCH = {"batch_size": 64, "num_gpus": 1, "gradient_accumulation": 1}
"""Factors of a global batch, with scModelForge's defaults."""


def _put_bins(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Take the bins over, with scModelForge's defaults; those that it fits to the corpus need quantiles."""
    _put(config, "tokens.bins", given.get("tokenizer.n_bins", 51))
    quantiles = given.get("tokenizer.binning_method", "uniform") == "quantile"
    _put(config, "tokens.binning", "quantile_corpus" if quantiles else "uniform")
    if quantiles:
        _put(config, "vocabulary.quantiles", True)


def check_translation(translation: Translation, source: str) -> None:
    """Raise ConfigError if the configuration, whose table exists by now, is refused."""
    check_config(translation.config, source)


def _one(config: dict[str, Any], key: str, value: Any) -> tuple[str, str]:
    """Take one key over, and return what became of it (written, advice or dropped) and the words on it."""
    if key in SAME:
        if value is None:
            return "dropped", f"null: {SAME[key]} has its default"
        _put(config, SAME[key], value)
        return "written", SAME[key]
    if key in CHOICES:
        here, names = CHOICES[key]
        if str(value) not in names:
            return "advice", f"{value}: none here; set {here}"
        _put(config, here, copy.deepcopy(names[str(value)]))
        return "written", f"{here}: {yaml.safe_dump(names[str(value)], default_flow_style=True).splitlines()[0]}"
    parts = key.split(".")
    for place in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
        if place in NO_EFFECT:
            return "dropped", f"had no effect there either: {NO_EFFECT[place]}"
        if place in NONE_HERE:
            return "dropped", f"none here: {NONE_HERE[place]}"
        if place in ELSEWHERE:
            return "advice", ELSEWHERE[place]
    return "dropped", "unknown to scModelForge too"


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    config.setdefault(section, {})[name] = value


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def translate(*, file: Path, out: Path) -> None:
    """Write the configuration `out`, and its table of datasets beside it as .tsv. Raises ConfigError."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{out}: expected a name that ends in .yaml; its table is beside it as .tsv")
    table = out.with_suffix(".tsv")
    for path in (out, table):
        if path.exists():
            raise ConfigError(f"{path} exists; choose another --out")
    made = translated(read_yaml(file), table)
    write_text(table, made.table)
    try:
        check_translation(made, str(file))
    except ConfigError:
        table.unlink()  # or the next try would find it there
        raise
    write_text(out, yaml.safe_dump(made.config, sort_keys=False))
    print("\n".join([*made.lines, f"{file} -> {out}, {table}"]), flush=True)
