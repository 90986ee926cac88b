"""A configuration of scModelForge becomes one that is accepted here, and every key of it is answered."""

from pathlib import Path

import pytest

from cellmill.cli import main
from cellmill.config.load import load_config

THEIRS = """
data: {paths: [a/one.h5ad, two.h5ad], gene_vocab: human_protein_coding, preprocessing: {hvg_selection: 2000}}
tokenizer: {strategy: rank_value, max_genes: 1024, masking: {mask_ratio: 0.3}}
model: {architecture: transformer_encoder, hidden_dim: 64, num_layers: 3, num_heads: 4, pooling: cls, activation: gelu}
training: {batch_size: 16, num_gpus: 4, gradient_accumulation: 2, max_epochs: 7, precision: bf16-mixed, val_split: 0.05,
  optimizer: {name: adam, lr: 3.0e-4}, scheduler: {name: cosine_warmup, total_steps: 9}, logger: wandb, strategy: ddp,
  wandb_project: mine}
eval: {benchmarks: [{name: linear_probe}]}
"""


def test_a_file_of_scmodelforge_is_accepted_and_every_key_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(THEIRS)
    assert main(["translate", str(theirs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out
    assert out.with_suffix(".tsv").read_text() == "dataset\tpath\none\ta/one.h5ad\ntwo\ttwo.h5ad\n"
    run = load_config(out).runs["translated"]
    assert (run.train.global_batch, run.train.epochs, run.train.lr, run.train.optimizer.name) == (128, 7, 3e-4, "adamw")
    assert (run.tokens.tokenizer, run.tokens.max_tokens, run.objective.name) == ("rank", 1024, "masked_gene")
    model = run.model.model_dump()
    assert (model["hidden"], model["heads"], model["dropout"]) == (64, 4, 0.1)  # the last is scModelForge's default
    vocabulary = load_config(out).corpora["corpus"].vocabulary
    assert (vocabulary.max_genes, vocabulary.select) == (2000, "seurat")
    assert run.parallel.precision == "bf16-mixed"
    assert run.track.model_dump()["to"]["wandb"]["project"] == "mine"
    assert "written  training.logger: track.to: {wandb: {}}\n" in lines
    assert "written  training.batch_size: train.global_batch: 128 = 16 x 4 x 2 (batch_size, num_gpus, " in lines
    assert {line.split()[0] for line in lines.splitlines()[:-1]} == {"written", "advice", "dropped"}
    assert len(lines.splitlines()) == 1 + 26
    assert "dropped  data.gene_vocab: had no effect there either: nothing read it" in lines
    assert "written  training.optimizer.name: train.optimizer: adamw\n" in lines
    assert "dropped  model.activation: none here: family encoder has GELU\n" in lines
    assert "advice   eval.benchmarks: evaluate.tasks" in lines
    assert main(["translate", str(theirs), "--out", str(out)]) == 2
    assert "exists; choose another --out" in capsys.readouterr().err
    assert main(["translate", str(out), "--out", str(tmp_path / "b.yaml")]) == 2
    assert "expected a configuration of scModelForge" in capsys.readouterr().err


def test_bins_and_sections_that_are_elsewhere_are_taken_over_or_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(
        """
data: {paths: [one.h5ad], census: {organism: Homo sapiens}, shards: {shard_size: 10}, streaming: true}
tokenizer: {strategy: binned_expression, n_bins: 21, binning_method: quantile, prepend_cls: true}
model: {hidden_dim: 64, num_layers: 1, num_heads: 2, pooling: mean}
training:
  strategy: fsdp
  fsdp: {sharding_strategy: SHARD_GRAD_OP, min_num_params: 1000, activation_checkpointing: true}
finetune: {freeze_backbone_epochs: 2, lora: {rank: 4, bias: none}, head: {task: regression}, label_kee: age}
"""
    )
    assert main(["translate", str(theirs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out
    given = load_config(out)
    run = given.runs["translated"]
    assert (run.tokens.model_dump()["bins"], run.tokens.model_dump()["binning"]) == (21, "quantile_corpus")
    assert given.corpora["corpus"].vocabulary.quantiles
    assert (run.parallel.sharding_strategy, run.parallel.activation_checkpointing) == ("SHARD_GRAD_OP", "full")
    for line in (
        "written  training.fsdp.activation_checkpointing: parallel.activation_checkpointing: full\n",
        "written  tokenizer.n_bins: tokens.bins: 21\n",
        "data.census.organism: `cellmill convert census",
        "data.shards.shard_size: had no effect there either",
        "training.fsdp.min_num_params: each block is sharded by itself\n",
        "finetune.freeze_backbone_epochs: finetune.head_steps of that run\n",
        "finetune.lora.rank: finetune.method: lora of that run",
        "finetune.lora.bias: none here: biases stay as they are\n",
        "finetune.head.task: objective classification or regression of that run\n",
        "finetune.label_kee: a run of its own with `init_from`",
    ):
        assert line in lines


def test_a_file_without_data_and_an_output_that_is_its_table_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("model: {hidden_dim: 64}\ndata: {}\n")
    for out, line in (
        ("out.yaml", "data.paths: expected a list of .h5ad files, got none; add them"),
        ("out.tsv", f"{tmp_path / 'out.tsv'}: expected a name that ends in .yaml; its table is beside it as .tsv"),
    ):
        assert main(["translate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err == f"cellmill translate: {line}\n"
