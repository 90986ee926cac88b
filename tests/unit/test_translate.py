"""A configuration of scModelForge becomes one that is accepted here, and every key of it is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellmill.cli import main
from cellmill.config.load import load_config

THEIRS = """
data: {paths: [a/one.h5ad, two.h5ad], gene_vocab: human_protein_coding, preprocessing: {hvg_selection: 2000}}
tokenizer: {strategy: rank_value, max_genes: 1024, masking: {mask_ratio: 0.3}}
model: {architecture: transformer_encoder, hidden_dim: 64, num_layers: 3, num_heads: 4, pooling: cls, activation: gelu}
training: {batch_size: 16, num_gpus: 4, gradient_accumulation: 2, max_epochs: 7, precision: bf16-mixed, val_split: 0.05,
  optimizer: {name: adam, lr: 3.0e-4}, scheduler: {name: cosine_warmup, total_steps: 9}, logger: wandb, strategy: ddp}
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
    assert (run.train.global_batch, run.train.epochs, run.train.lr, run.train.optimizer) == (128, 7, 3e-4, "adamw")
    assert (run.tokens.tokenizer, run.tokens.max_tokens, run.objective.name) == ("rank", 1024, "masked_gene")
    model = run.model.model_dump()
    assert (model["hidden"], model["heads"], model["dropout"]) == (64, 4, 0.1)  # the last is scModelForge's default
    vocabulary = load_config(out).corpora["corpus"].vocabulary
    assert (vocabulary.max_genes, vocabulary.select) == (2000, "seurat")
    assert run.parallel.precision == "bf16-mixed"
    assert "data.gene_vocab: had no effect there either: nothing read it" in lines
    assert "training.optimizer.name: train.optimizer: adamw\n" in lines
    assert "model.activation: not translated\n" in lines
    assert "eval.benchmarks: evaluate.tasks" in lines
    assert main(["translate", str(theirs), "--out", str(out)]) == 2
    assert "exists; choose another --out" in capsys.readouterr().err
    assert main(["translate", str(out), "--out", str(tmp_path / "b.yaml")]) == 2
    assert "expected a configuration of scModelForge" in capsys.readouterr().err
