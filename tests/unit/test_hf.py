"""Family hf: transformers' own models behind the contract, with their inputs, weights and head."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import SMALL, export_model
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from cellmill.cli import main
from cellmill.config.checks import check_together
from cellmill.config.load import check_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.families import model_folder
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import RESIDUES, SPECIAL, Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.stream.batch import Batch, empty_batch
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.finetune.method import Depth
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, load_model
from cellmill.models.families.hf import HfModel, write_transformers
from cellmill.parallel.materialize import materialize
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import measure_size

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cellmill[hf]'"
)
pytestmark = pytest.mark.full

ESM = [*("<cls>", "<pad>", "<eos>", "<unk>"), *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
"""Lines of the vocab.txt of ESM-2."""
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TYPES: dict[str, dict[str, Any]] = {
    "esm": SHAPE
    | {"max_position_embeddings": 130, "position_embedding_type": "rotary", "pad_token_id": 0},
    "bert": SHAPE | {"hidden_dropout_prob": 0.3},
    "roberta": SHAPE | {"max_position_embeddings": 130},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": SHAPE,
    "qwen3": SHAPE | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": SHAPE
    | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    "qwen2": SHAPE
    | {"num_key_value_heads": 2}
    | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
    "modernbert": SHAPE | {"local_attention": 4, "global_attn_every_n_layers": 2},
}
TOKENS = {"tokenizer": "sequence", "max_tokens": 100}
MASKED = {"name": "masked_gene", "cell_loss_weight": 0}
BEHIND: dict[str, set[str]] = {
    "esm": {"body.encoder.emb_layer_norm_after.weight", "body.encoder.emb_layer_norm_after.bias"},
    "gpt2": {"body.ln_f.weight", "body.ln_f.bias"},
    "llama": {"body.norm.weight"},
    "qwen3": {"body.norm.weight"},
    "gemma3_text": {"body.norm.weight"},
    "qwen2": {"body.norm.weight"},
    "modernbert": {"body.final_norm.weight"},
}
"""Parameters behind the blocks; the blocks of the other types end with a norm of their own."""
SEQUENCES = ("MQIFVKTLTG", "GIVEQCCTSICSLYQLENYCN", "MKU")
VOCABULARY = Vocabulary(
    list(RESIDUES), list(RESIDUES), np.ones(len(RESIDUES), np.int64), np.ones(len(RESIDUES))
)


def spec_of(model: dict[str, Any], objective: dict[str, Any] = MASKED, **levels: Any) -> ModelSpec:
    return ModelSpec(
        FamilyConfig.model_validate({"family": "hf"} | model),
        ObjectiveConfig.model_validate(objective),
        Tokens.model_validate(TOKENS),
        len(RESIDUES),
        levels,
    )


def made(model: dict[str, Any]) -> Any:
    """The model with its initial values, in eval mode."""
    network = build(spec_of(model))
    materialize(network, torch.device("cpu"), initial_tensors(network, 0, None, VOCABULARY))
    return network.eval()


def batch() -> Any:
    rows = [np.array(list(map(RESIDUES.index, sequence)), np.int32) for sequence in SEQUENCES]
    lengths = [len(row) for row in rows]
    places = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return to_tensors(
        Batch(np.concatenate(rows) + len(SPECIAL), places, cu_seqlens, np.arange(len(rows)))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ESM-2 with its language-model head and random weights, as transformers saves it."""
    path = tmp_path_factory.mktemp("esm")
    shape = SHAPE | {
        "max_position_embeddings": 130,
        "position_embedding_type": "rotary",
        "token_dropout": True,
    }
    torch.manual_seed(0)
    config = transformers.EsmConfig(vocab_size=len(ESM), pad_token_id=1, mask_token_id=32, **shape)
    network = transformers.EsmForMaskedLM(config)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # norms and biases too
    network.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(ESM) + "\n")
    return path


def padded_ids(hidden: set[tuple[int, int]] = frozenset()) -> torch.Tensor:  # type: ignore[assignment]
    """(cells, longest) token ids of ESM-2, with <mask> at the (cell, place) in `hidden`."""
    rows = []
    for cell, sequence in enumerate(SEQUENCES):
        letters = [
            "<mask>" if (cell, place) in hidden else letter for place, letter in enumerate(sequence)
        ]
        rows.append(torch.tensor([ESM.index(token) for token in ("<cls>", *letters, "<eos>")]))
    return pad_sequence(rows, batch_first=True, padding_value=ESM.index("<pad>"))


def check_vectors(
    network: Any, theirs: Any, ids: torch.Tensor, pad: int = 0, first: int = 0
) -> None:
    """The vectors of our model are the means of transformers' states of `ids`, from place `first`
    on.
    """
    with torch.inference_mode():
        states = theirs.eval()(input_ids=ids, attention_mask=(ids != pad).long()).last_hidden_state
        expected = torch.stack(
            [row[first : first + len(cell)].mean(0) for row, cell in zip(states, SEQUENCES)]
        )
        torch.testing.assert_close(network.embed(batch()), expected, atol=1e-5, rtol=1e-5)


def test_embeddings_of_a_pretrained_folder_equal_transformers(folder: Path) -> None:
    check_vectors(
        made({"path": str(folder)}),
        transformers.EsmModel.from_pretrained(folder),
        padded_ids(),
        1,
        1,
    )


def test_transformers_reads_an_exported_model(folder: Path, tmp_path: Path) -> None:
    VOCABULARY.write(tmp_path / "vocabulary.tsv")
    model: dict[str, Any] = dict.fromkeys(SMALL) | {
        "family": "hf",
        "objective": "masked_gene",
        "path": str(folder),
    }
    exported = export_model(tmp_path / "model", tmp_path / "vocabulary.tsv", TOKENS, **model)
    assert (
        main(
            [
                "export",
                "--format",
                "transformers",
                "--model",
                str(exported),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "out")
    check_vectors(load_model(exported)[0], theirs, padded_ids(), 1, 1)
    weights = (exported / "model.safetensors").read_bytes()
    assert (
        main(
            ["export", "--format", "transformers", "--model", str(exported), "--out", str(exported)]
        )
        == 2
    )
    # the model's own file has that name too
    assert (exported / "model.safetensors").read_bytes() == weights
    table = dict(
        line.split("\t") for line in (tmp_path / "out" / "tokens.tsv").read_text().splitlines()
    )
    assert all(table[residue] == str(ESM.index(residue)) for residue in RESIDUES)


def test_the_head_of_the_folder_predicts_like_transformers(folder: Path) -> None:
    network: Any = made({"path": str(folder)})
    prepared = network.prepare(batch(), seed=0, step=0)
    starts = np.cumsum([0, *map(len, SEQUENCES)])
    hidden = []
    for target in prepared.target_tokens.tolist():
        cell = int(prepared.token_cells[target])
        hidden.append((cell, target - starts[cell]))
    ids = padded_ids(set(hidden))
    with torch.inference_mode():
        logits = network.objective.predict_from_head(
            network, network.head(network.states(prepared)[prepared.target_tokens]), prepared
        )
        theirs = transformers.EsmForMaskedLM.from_pretrained(folder).eval()
        out = theirs(input_ids=ids, attention_mask=(ids != ESM.index("<pad>")).long()).logits
    expected = torch.stack([out[cell, place + 1] for cell, place in hidden])[
        :, [ESM.index(r) for r in RESIDUES]
    ]
    torch.testing.assert_close(logits[:, len(SPECIAL) :], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_every_model_type_equals_transformers(kind: str) -> None:
    options = {"weights": "random", "architecture": {"model_type": kind} | TYPES[kind]}
    network: Any = made(options)
    prepared = network.prepare(batch(), seed=0, step=0)
    network.train()
    losses = [network(prepared) for _ in range(2)]
    assert losses[0].item() == losses[1].item(), "a draw is not keyed"
    losses[0].backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    depth = Depth.of(network)
    trunk = [name for name, _ in network.named_parameters() if not depth.is_head(name)]
    levels = {name: depth.level(name) for name in trunk if not name.startswith("blocks.")}
    assert {name for name, level in levels.items() if level == 2} == BEHIND.get(kind, set())
    assert {*levels.values()} <= {0, 2}
    network.zero_grad()
    empty = network(network.prepare(to_tensors(empty_batch(np.dtype(np.int32))), seed=0, step=0))
    empty.backward()
    assert empty.item() == 0
    assert not any(
        parameter.grad.any() for parameter in network.parameters() if parameter.grad is not None
    )

    theirs = transformers.AutoModel.from_config(network.body.config).eval()
    names = {
        name: name.removeprefix("body.")
        for name in network.state_dict()
        if name.startswith("body.")
    }
    blocks = {name for name in network.state_dict() if name.startswith("blocks.")}
    names |= {name: f"{network.blocks_path}{name.removeprefix('blocks')}" for name in blocks}
    state = network.state_dict()
    wrong = theirs.load_state_dict(
        {full: state[name] for name, full in names.items()}, strict=False
    )
    assert not wrong.unexpected_keys
    assert all(name.startswith(("pooler", "contact_head")) for name in wrong.missing_keys)
    check_vectors(
        network.eval(),
        theirs,
        pad_sequence(batch().token_ids.split([*map(len, SEQUENCES)]), batch_first=True),
    )

    size = measure_size(spec_of(options))
    assert size.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert size.n_blocks == 2
    assert size.flops.count(Load(1, 0, 0)) > 6 * size.n_blocks * size.block.parameters * 0.9


@pytest.mark.parametrize("kind", ["mpnet", "deberta-v2", "gpt_neo"])
def test_types_whose_blocks_return_more_are_refused(kind: str) -> None:
    shape = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    options = {"model_type": kind} | (shape if kind == "gpt_neo" else {})
    network = made({"weights": "random", "architecture": SHAPE | options})
    with pytest.raises(ConfigError, match=f"model_type {kind} is not supported"):
        network.embed(batch())


def test_a_type_that_is_refused_is_refused_where_training_begins() -> None:
    architecture = SHAPE | {"model_type": "deberta-v2"}
    network = made({"weights": "random", "architecture": architecture})
    with pytest.raises(ConfigError, match="model_type deberta-v2 is not supported: not enough"):
        Depth.of(network)


def test_a_type_that_leaves_out_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = made(
        {"weights": "random", "architecture": {"model_type": "bert"} | TYPES["bert"]}
    )
    monkeypatch.setattr(network.body.encoder, "layer", network.body.encoder.layer[:1])
    with pytest.raises(ConfigError, match="bert is not supported: it calls 1 of 2 blocks"):
        network.embed(batch())


def test_an_export_that_computes_other_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    VOCABULARY.write(tmp_path / "vocabulary.tsv")
    config = transformers.Qwen2Config(**TYPES["qwen2"], vocab_size=9, initializer_range=0.2)
    transformers.Qwen2Model(config).save_pretrained(tmp_path / "theirs")
    model: dict[str, Any] = dict.fromkeys(SMALL) | {"family": "hf", "objective": "masked_gene"}
    model |= {"path": str(tmp_path / "theirs")}
    exported = export_model(tmp_path / "model", tmp_path / "vocabulary.tsv", TOKENS, **model)
    write_transformers(exported, tmp_path / "right")
    through = HfModel.through

    def with_one_mask(self: Any, x: Any, prepared: Any) -> Any:
        self.calls[:] = self.calls[:1] * len(self.calls)
        return through(self, x, prepared)

    monkeypatch.setattr(HfModel, "through", with_one_mask)
    with pytest.raises(DataError, match="transformers computes other states than cellmill"):
        write_transformers(exported, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / "config.json").exists()


def test_the_pickle_of_a_folder_is_never_read(folder: Path, tmp_path: Path) -> None:
    config = FamilyConfig.model_validate({"family": "hf", "path": str(folder)})
    stored = config.model_dump(mode="json")
    assert stored["residue_ids"]["A"] == ESM.index("A")
    assert stored["residue_ids"]["begin"] == ESM.index("<cls>")
    assert FamilyConfig.model_validate(stored | {"path": "/gone"}) == config.model_copy(
        update={"path": "/gone"}
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    (tmp_path / "pytorch_model.bin").write_text("not opened")
    with pytest.raises(
        DataError,
        match=r"pytorch_model\.bin is a pickle, which is never opened; where you trust it,",
    ):
        made({"path": str(tmp_path)})


def test_a_hub_name_is_looked_up_in_the_cache_at_its_revision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--facebook--esm2"
    (model / "snapshots").mkdir(parents=True)
    (model / "snapshots" / "abc123").symlink_to(folder)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc123")
    for revision in (None, "main", "abc123"):
        config: Any = FamilyConfig.model_validate(
            {"family": "hf", "path": "facebook/esm2", "revision": revision}
        )
        assert config.architecture["hidden_size"] == 32
    with pytest.raises(
        ValueError, match=r"snapshots/v2 does not exist; run: hf download facebook/esm2"
    ):
        FamilyConfig.model_validate({"family": "hf", "path": "facebook/esm2", "revision": "v2"})


@pytest.mark.parametrize(
    "variables",
    [
        {"XDG_CACHE_HOME": "{}/x"},
        {"HF_HOME": "$SCRATCH/hf"},
        {"XDG_CACHE_HOME": "{}/x", "HUGGINGFACE_HUB_CACHE": "{}/old"},
        {"HF_HOME": "{}/hf", "HF_HUB_CACHE": "{}/hub", "HUGGINGFACE_HUB_CACHE": "{}/old"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    snapshot = Path(done.stdout.strip(), "models--a--b/snapshots/v1")
    snapshot.mkdir(parents=True)
    assert model_folder("a/b", "v1") == snapshot


def test_the_untrained_row_of_a_pretrained_model_is_random(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "esm"
    shutil.copytree(folder, path)
    VOCABULARY.write(tmp_path / "vocabulary.tsv")
    model: dict[str, Any] = dict.fromkeys(SMALL) | {"family": "hf", "objective": "masked_gene"}
    model |= {"path": str(path)}
    exported = export_model(tmp_path / "model", tmp_path / "vocabulary.tsv", TOKENS, **model)
    shutil.rmtree(path)  # as on another machine
    network, vocabulary, config = load_model(exported)
    manifest: Any = None
    evaluated = EvaluatedModel(
        network, config, vocabulary, Tokens.model_validate(TOKENS), manifest, 0
    )
    ours, untrained = network.embed(batch()), evaluated.untrained.embed(batch())
    assert (ours - untrained).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parallel": {"tp": 2}},
            "parallel.tp 2: family hf does not support tensor parallelism; set tp to 1",
        ),
        (
            {"parallel": {"pp": 2}},
            "parallel.pp 2: family hf does not support pipelines; set pp to 1",
        ),
        (
            {"parallel": {"compile": True}},
            "parallel.compile: family hf is not compiled; set compile to no",
        ),
        (
            {"objective": {"name": "masked_gene"}},
            "objective.cell_loss_weight: family hf embeds places inside its layers; set it to 0",
        ),
        (
            {"objective": {"name": "sum", "parts": {"genes": {"name": "masked_gene"}}}},
            "objective.parts.genes.cell_loss_weight: family hf embeds places inside its layers; set it to 0",
        ),
        (
            {"tokens": TOKENS | {"max_tokens": 200}},
            "tokens.max_tokens: expected at most 126 for model.path, got 200",
        ),
        (
            {"tokens": {"tokenizer": "continuous"}},
            "has values of kind scalar, family hf embeds none, place",
        ),
        (
            {"tokens": TOKENS, "model": {"residue_ids": {"A": 0}}},
            "model.residue_ids: no id of B, C, D, E",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(
    change: dict[str, Any], message: str, folder: Path
) -> None:
    base: dict[str, Any] = {
        "tokens": TOKENS,
        "stream": {},
        "parallel": {},
        "train": {"steps": 1},
        "objective": MASKED,
    }
    model = {"family": "hf", "path": str(folder)} | change.get("model", {})
    with pytest.raises(ConfigError) as caught:
        check_together(check_options(TrainOptions, base | change | {"model": model}, "test"))
    assert message in str(caught.value)


def test_a_config_that_asks_for_remote_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "esm", "auto_map": {"AutoModel": "x.Y"}})
    )
    with pytest.raises(ValueError, match=r"asks for remote code \(auto_map\), which is never run"):
        FamilyConfig.model_validate({"family": "hf", "path": str(tmp_path)})


def test_the_rows_of_a_loss_that_couples_cells_are_collected() -> None:
    esm = {"architecture": {"model_type": "esm"} | TYPES["esm"], "weights": "random"}
    contrast = {"name": "supervised_contrastive", "label_column": "kind"}
    model: Any = build(spec_of(esm, contrast, kind=("short", "long")))
    materialize(model, torch.device("cpu"), initial_tensors(model, 0, None, VOCABULARY))
    prepared = model.prepare(replace(batch(), levels=torch.tensor([[1], [2], [1]])), seed=0, step=0)
    model.kept_rows = []
    assert model(prepared) == 0
    ((rows,),) = model.kept_rows
    assert rows[:, 0].tolist() == [1, 2, 1]
    torch.testing.assert_close(rows[:, 1:], functional.normalize(model.embed(batch())))
