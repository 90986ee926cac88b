"""Folders of published models, by layout: their files, and the sections of a run that starts from them.

A run names one as `init_from: geneformer:FOLDER` or `scgpt:FOLDER`; rule `import` makes a model folder of it. A dry run
reads the layout's own JSON, so nothing here imports torch or unpickles: the token dictionary is searched for <cls>.
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
        *((pattern,) for pattern in DICTIONARIES),
    ),
    "scgpt": (("args.json",), ("best_model.pt", "model.safetensors"), ("vocab.json",)),
}
"""Files of each layout, the options first, then the weights; of several names the first that is there."""
BERT = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
}
SCGPT = {"hidden": "embsize", "layers": "nlayers", "heads": "nheads", "ffn_hidden": "d_hid"}
"""Our options, and those of BERT and scGPT."""


def published_file(folder: Path, *names: str) -> Path:
    """The file of the first of these names or patterns that has one. Raises DataError for none, or for several."""
    found = next((paths for name in names if (paths := sorted(folder.glob(name)))), [])
    if len(found) != 1:
        got = ", ".join(path.name for path in found) or "none"
        raise DataError(f"{folder}: expected one {' or '.join(names)}, got {got}; copy the one of these weights there")
    require_file(found[0])
    return found[0]


def read_mapping(path: Path) -> Json:
    """Return the mapping in a JSON file. Raises DataError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a mapping, got {type(value).__name__}")
    return value


def require(path: Path, mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise DataError(f"{path}: {name} is missing")
    return mapping[name]


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
        """A name for files, different for each folder: of its letters, digits, dots and dashes, and a digest."""
        letters = re.sub(r"[^A-Za-z0-9.-]+", "_", self.folder.name)[:60]
        return f"{self.kind}-{letters}-{digest(str(self.folder))[:8]}"

    @property
    def model(self) -> str:
        """Model folder that rule `import` makes."""
        return f"results/published/{self.name}"

    def files(self) -> list[Path]:
        """Files in the order of FILES. Raises DataError for a missing, incomplete or other folder."""
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder; give the folder with the published files")
        if (self.folder / "vocabulary.tsv").exists() and (self.folder / "model.safetensors").exists():
            raise DataError(f"{self.folder}: this is a model folder of cellmill already; use it as it is")
        return [published_file(self.folder, *names) for names in FILES[self.kind]]

    def sections(self) -> dict[str, Json]:
        """Sections `model` and `tokens`, by name. Raises DataError for files of another model."""
        return geneformer_sections(self.folder) if self.kind == "geneformer" else scgpt_sections(self.folder)


def model_folder_of(parent: str) -> str:
    """The model folder that an `init_from` other than a run names: of a published folder and the hub, the rule's."""
    if (published := PublishedFolder.named_by(parent)) is not None:
        return published.model
    return f"results/hub/{parent.removeprefix('hf://')}" if parent.startswith("hf://") else str(Path(parent))


def vocabulary_file(model: str) -> str:
    """The vocabulary of a model: `model` itself, or that of the model folder of a published one."""
    published = PublishedFolder.named_by(model)
    return model if published is None else f"{published.model}/vocabulary.tsv"


def geneformer_sections(folder: Path) -> dict[str, Json]:
    """Sections of a folder of Geneformer. The vector of a cell is its default, of the second to last layer: the state
    of <cls> where the dictionary has it (V2), else the mean (V1)."""
    path, tokens = published_file(folder, "config.json"), published_file(folder, DICTIONARIES[0])
    names = tokens.read_bytes()  # a pickle has its texts as they are
    ends = "cls_eos" if b"<cls>" in names and b"<eos>" in names else "none"
    config = read_mapping(path)
    sizes = (*BERT.values(), "max_position_embeddings")
    for name in (*sizes, "hidden_act"):
        require(path, config, name)
    expected = {"model_type": ("bert",), "position_embedding_type": ("absolute",), "hidden_act": ("gelu", "relu")}
    for name, known in expected.items():
        if (value := config.get(name, known[0])) not in known:
            raise DataError(f"{path}: {name}: expected {' or '.join(known)}, got {value!r}; it is no Geneformer")
    if wrong := [name for name in sizes if not isinstance(config[name], int) or config[name] < 1]:
        raise DataError(f"{path}: {wrong[0]}: expected a number above 0, got {config[wrong[0]]!r}")
    longest = config["max_position_embeddings"] - {"none": 0, "cls_eos": 2}[ends]
    if longest < 1:
        raise DataError(
            f"{path}: max_position_embeddings: expected more than the 2 of <cls> and <eos>, got "
            f"{config['max_position_embeddings']}"
        )
    options = {
        **{ours: config[name] for ours, name in BERT.items()},
        "family": "bert",
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "activation": config["hidden_act"],
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "ends": ends,
        "pooling": "mean" if ends == "none" else "cls",
        "embed_layer": -1,
    }
    return {"model": options, "tokens": {"tokenizer": "rank", "max_tokens": longest}}


def scgpt_sections(folder: Path) -> dict[str, Json]:
    """Sections of a folder of scGPT, of at most 1,200 tokens with <cls>."""
    path = published_file(folder, "args.json")
    config = read_mapping(path)
    for name in SCGPT.values():
        if not isinstance(require(path, config, name), int):
            raise DataError(f"{path}: {name}: expected a number, got {config[name]!r}")
    if type(bins := config.get("n_bins", 51)) is not int or bins < 3:
        raise DataError(f"{path}: n_bins: expected a whole number from 3, got {bins!r}")
    style = config.get("input_emb_style", "continuous")
    if style != "continuous" or config.get("pre_norm"):
        problem = "pre_norm is set" if config.get("pre_norm") else f"input_emb_style is {style!r}"
        raise DataError(f"{path}: expected post-norm blocks over continuous values, but {problem}")
    options = {
        **{ours: config[name] for ours, name in SCGPT.items()},
        "family": "scgpt",
        "activation": "relu",
        "ends": "cls",
        "pooling": "cls",
        "dropout": config.get("dropout", 0.2),
        "cls_value": config.get("pad_value", 0),
    }
    return {"model": options, "tokens": {"tokenizer": "binned", "bins": bins - 1, "max_tokens": 1199}}
