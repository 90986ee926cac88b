"""Folders of published models: their files, and the sections of a run that starts from them.

A run names one as `init_from: geneformer:FOLDER` or `scgpt:FOLDER`; rule `import` makes a model
folder of it. A dry run reads the layout's own JSON, so nothing here imports torch or unpickles: the
token dictionary is searched for <cls>.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cellmill.errors import DataError
from cellmill.files import digest, read_json, require_file

Json = dict[str, Any]
DICTIONARIES = ("token_dictionary*.pkl", "gene_median_dictionary*.pkl")
FILES: dict[str, tuple[tuple[str, ...], ...]] = {
    "geneformer": (
        ("config.json",),
        ("model.safetensors", "pytorch_model.bin"),
        *zip(DICTIONARIES),
    ),
    "scgpt": (("args.json",), ("best_model.pt", "model.safetensors"), ("vocab.json",)),
}
"""Files of each layout, the options first, then the weights; of several names the first that is
there.
"""
SIZES = ("hidden", "layers", "heads", "ffn_hidden")
BERT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SCGPT = ("embsize", "nlayers", "nheads", "d_hid")
"""Our sizes, and those of BERT and scGPT in the same order."""
# name and revision of a model on the Hugging Face hub
HUB_MODEL = r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?"


def published_file(folder: Path, *names: str) -> Path:
    """The file of the first name or pattern that has any. Raise DataError unless it is exactly one."""
    paths: list[Path] = []
    for name in names:
        paths = paths or sorted(folder.glob(name))
    if len(paths) != 1:
        got = ", ".join(path.name for path in paths) or "none"
        raise DataError(
            f"{folder}: expected one {' or '.join(names)}, got {got}; copy the one of these weights there"
        )
    require_file(paths[0])
    return paths[0]


def read_mapping(path: Path) -> Json:
    """Return the mapping in a JSON file. Raise DataError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a mapping, got {type(value).__name__}")
    return value


def require(path: Path, mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise DataError(f"{path}: {name} is missing")
    return mapping[name]


def _whole(path: Path, config: Json, name: str, least: int = 1) -> int:
    value = require(path, config, name)
    if type(value) is not int or value < least:
        raise DataError(f"{path}: {name}: expected a whole number from {least}, got {value!r}")
    return int(value)


@dataclass(frozen=True)
class PublishedFolder:
    """A folder of a published layout, `kind`."""

    kind: str
    folder: Path

    @classmethod
    def named_by(cls, parent: str) -> Self | None:
        """The folder that an `init_from` names as `KIND:FOLDER`; None for another parent."""
        kind, _, folder = parent.partition(":")
        return cls(kind, Path(folder)) if kind in FILES and folder else None

    @property
    def name(self) -> str:
        """A name for files, different for each folder: its plain characters and a digest."""
        letters = re.sub(r"[^A-Za-z0-9.-]+", "_", self.folder.name)[:60]
        return f"{self.kind}-{letters}-{digest(str(self.folder))[:8]}"

    @property
    def model(self) -> str:
        """Model folder that rule `import` makes."""
        return f"results/published/{self.name}"

    def files(self) -> list[Path]:
        """Files in the order of FILES. Raise DataError for a missing, incomplete or other folder."""
        if not self.folder.is_dir():
            raise DataError(
                f"{self.folder}: no such folder; give the folder with the published files"
            )
        if (self.folder / "vocabulary.tsv").exists() and (
            self.folder / "model.safetensors"
        ).exists():
            raise DataError(
                f"{self.folder}: this is a model folder of cellmill already; use it as it is"
            )
        return [published_file(self.folder, *names) for names in FILES[self.kind]]

    def sections(self) -> dict[str, Json]:
        """Sections `model` and `tokens`, by name. Raise DataError for files of another model."""
        if self.kind == "geneformer":
            return geneformer_sections(self.folder)
        return scgpt_sections(self.folder)


def model_folder_of(parent: str) -> str:
    """The model folder that an `init_from` other than a run names, or that a rule makes of it."""
    published = PublishedFolder.named_by(parent)
    if published is not None:
        return published.model
    if parent.startswith("hf://"):
        return f"results/hub/{parent.removeprefix('hf://')}"
    return str(Path(parent))


def vocabulary_file(model: str) -> str:
    """The vocabulary of a model: `model` itself, or that of the model folder of a published one."""
    published = PublishedFolder.named_by(model)
    return model if published is None else f"{published.model}/vocabulary.tsv"


def geneformer_sections(folder: Path) -> dict[str, Json]:
    """Sections of a folder of Geneformer.

    The vector of a cell is its default, of the second to last layer: the state of <cls> where the
    dictionary has it (V2), else the mean (V1).
    """
    path = published_file(folder, "config.json")
    tokens = published_file(folder, DICTIONARIES[0])
    config = {
        "model_type": "bert",
        "position_embedding_type": "absolute",
        "hidden_act": None,
    } | read_mapping(path)
    names = tokens.read_bytes()  # a pickle has its texts as they are
    n_ends = 2 if b"<cls>" in names and b"<eos>" in names else 0
    sizes = {ours: _whole(path, config, name) for ours, name in zip(SIZES, BERT)}
    longest = _whole(path, config, "max_position_embeddings", 1 + n_ends)
    expected = {
        "model_type": ("bert",),
        "position_embedding_type": ("absolute",),
        "hidden_act": ("gelu", "relu"),
    }
    for name, known in expected.items():
        if config[name] not in known:
            raise DataError(
                f"{path}: {name}: expected {' or '.join(known)}, got {config[name]!r}; it is no Geneformer"
            )
    options = {
        **sizes,
        "family": "bert",
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "activation": config["hidden_act"],
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "ends": "cls_eos" if n_ends else "none",
        "pooling": "cls" if n_ends else "mean",
        "embed_layer": -1,
    }
    return {"model": options, "tokens": {"tokenizer": "rank", "max_tokens": longest - n_ends}}


def scgpt_sections(folder: Path) -> dict[str, Json]:
    """Sections of a folder of scGPT, of at most 1,200 tokens with <cls>."""
    path = published_file(folder, "args.json")
    config = {"n_bins": 51, "input_emb_style": "continuous", "pre_norm": False} | read_mapping(path)
    if config["input_emb_style"] != "continuous" or config["pre_norm"]:
        problem = f"input_emb_style is {config['input_emb_style']!r}"
        if config["pre_norm"]:
            problem = "pre_norm is set"
        raise DataError(f"{path}: expected post-norm blocks over continuous values, but {problem}")
    options = {
        **{ours: _whole(path, config, name) for ours, name in zip(SIZES, SCGPT)},
        "family": "scgpt",
        "activation": "relu",
        "ends": "cls",
        "pooling": "cls",
        "dropout": config.get("dropout", 0.2),
        "cls_value": config.get("pad_value", 0),
    }
    bins = _whole(path, config, "n_bins", 3) - 1
    return {"model": options, "tokens": {"tokenizer": "binned", "bins": bins, "max_tokens": 1199}}
