"""A configuration of scModelForge becomes one that is accepted here, and every key of it is
answered.
"""

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


def test_every_key_of_scmodelforge_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    out = tmp_path / "ours.yaml"
    theirs.write_text(THEIRS)
    assert main(["translate", str(theirs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out
    assert out.with_suffix(".tsv").read_text() == "dataset\tpath\none\ta/one.h5ad\ntwo\ttwo.h5ad\n"
    ours = load_config(out)
    run = ours.runs["translated"]
    vocabulary = ours.corpora["corpus"].vocabulary
    assert (run.train.global_batch, run.train.epochs, run.train.lr, run.train.optimizer.name) == (
        128,
        7,
        3e-4,
        "adamw",
    )
    assert (run.tokens.tokenizer, run.tokens.max_tokens, run.objective.name) == (
        "rank",
        1024,
        "masked_gene",
    )
    model = run.model.model_dump()
    # the last is scModelForge's default
    assert (model["hidden"], model["heads"], model["dropout"]) == (64, 4, 0.1)
    assert (vocabulary.max_genes, vocabulary.select) == (2000, "seurat")
    assert run.parallel.precision == "bf16-mixed"
    assert run.track.model_dump()["to"]["wandb"]["project"] == "mine"
    assert (
        "written  training.batch_size: train.global_batch: 128 = 16 x 4 x 2 (batch_size, num_gpus, "
        in lines
    )
    assert {line.split()[0] for line in lines.splitlines()[:-1]} == {"written", "advice", "dropped"}
    assert len(lines.splitlines()) == 1 + 26
    assert "dropped  data.gene_vocab: had no effect there either: nothing read it" in lines
    assert "written  training.optimizer.name: train.optimizer: adamw\n" in lines
    assert "dropped  model.activation: none here: family encoder has GELU\n" in lines
    assert "advice   eval.benchmarks: evaluate.tasks" in lines


def test_sections_that_moved_are_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    out = tmp_path / "ours.yaml"
    theirs.write_text(
        """
data: {paths: [one.h5ad], census: {organism: Homo sapiens}}
tokenizer: {strategy: binned_expression, n_bins: 21, binning_method: quantile, prepend_cls: true}
model: {hidden_dim: 64, num_layers: 1, num_heads: 2, pooling: mean}
training: {strategy: fsdp, fsdp: {sharding_strategy: SHARD_GRAD_OP, activation_checkpointing: true}}
finetune: {lora: {rank: 4, bias: none}, label_kee: age}
"""
    )
    assert main(["translate", str(theirs), "--out", str(out)]) == 0
    lines = capsys.readouterr().out
    given = load_config(out)
    run = given.runs["translated"]
    assert (run.tokens.model_dump()["bins"], run.tokens.model_dump()["binning"]) == (
        21,
        "quantile_corpus",
    )
    assert given.corpora["corpus"].vocabulary.quantiles
    assert (run.parallel.sharding_strategy, run.parallel.activation_checkpointing) == (
        "SHARD_GRAD_OP",
        "full",
    )
    for line in (
        "written  tokenizer.n_bins: tokens.bins: 21\n",
        "data.census.organism: `cellmill convert census",
        "finetune.lora.bias: none here: biases stay as they are\n",
        "finetune.label_kee: a run of its own with `init_from`",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("theirs", "out", "line"),
    [
        (
            "data: {}\nmodel: {}\n",
            "b.yaml",
            "data.paths: expected a list of .h5ad files, got none; add them",
        ),
        (
            "data: {}\nmodel: {}\n",
            "b.tsv",
            "b.tsv: expected a name that ends in .yaml; its table is next to it as .tsv",
        ),
        ("data: {}\nmodel: {}\n", "old.yaml", "old.yaml exists; choose another --out"),
        (
            "runs: {}\n",
            "b.yaml",
            "expected a configuration of scModelForge, with sections data and model",
        ),
    ],
)
def test_an_unusable_file_to_translate_is_refused_in_one_line(
    theirs: str,
    out: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(theirs)
    Path("old.yaml").touch()
    assert main(["translate", "a.yaml", "--out", out]) == 2
    assert capsys.readouterr().err == f"cellmill translate: {line}\n"
