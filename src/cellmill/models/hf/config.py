"""Options of the `hf` family: a model of the transformers library, from a folder on this machine. Torch-free.

The folder is read when the configuration is: `architecture` and `residue_ids` then hold all of it but the weights, so
checkpoints and exported models need neither the folder nor a network.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import FamilyConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import RESIDUES, Tokens

SPECIAL_IDS = {
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
    "begin": ("<cls>", "[CLS]", "<s>"),
    "end": ("<eos>", "[SEP]", "</s>"),
}
"""Names of the special tokens in a vocab.txt, by their part in a sequence."""
IGNORED = ("architectures", "dtype", "torch_dtype", "id2label", "label2id", "_name_or_path", "transformers_version")
"""Keys of a config.json that define nothing here: weights are float32, heads are the objective's."""
OFFSET_TYPES = ("esm", "roberta", "xlm-roberta", "camembert")
"""Types of models whose positions count from pad_token_id + 1."""


class HfConfig(FamilyConfig):
    """A model of the transformers library."""

    implementation: ClassVar[str] = "cellmill.models.hf.padded_model:HfModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("none", "place")
    objectives: ClassVar[tuple[str, ...]] = ("masked_gene", "cell_decoding", "supervised_contrastive")
    compiles: ClassVar[bool] = False
    weight_keys: ClassVar[tuple[str, ...]] = ("family", "architecture", "residue_ids")

    family: Literal["hf"] = Field(
        "hf",
        description="An encoder or causal model of the transformers library, such as ESM-2, from its config.json. "
        "Cells of a micro-batch are padded to the longest. Dropout is off, and remote code is never run.",
    )
    path: str | None = Field(
        None,
        description="Folder with config.json, vocab.txt for residues, and *.safetensors; or the name of a Hugging Face "
        "hub model in this machine's cache (`hf download NAME`); null if architecture is given.",
    )
    revision: str | None = Field(None, description="Revision of a hub name: a branch, tag or commit; null is main.")
    weights: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="Initial weights: those of the folder, or random ones, with the config's initializer range.",
    )
    architecture: dict[str, Any] | None = Field(
        None, description="Contents of a config.json; null reads the one in path."
    )
    residue_ids: dict[str, int] | None = Field(
        None,
        description="Token id of each residue, and of `pad`, `mask`, `begin` and `end`; null reads the vocab.txt of "
        "path. Without one, tokens are numbered as in the corpus.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_folder(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("architecture") is not None:
            return given
        path = given.get("path")
        if path is None:
            raise ValueError("path: expected a folder with config.json, or a hub name; or set architecture")
        folder = model_folder(path, given.get("revision"))
        ids = given.get("residue_ids")
        return given | {
            "architecture": _read_config(folder / "config.json"),
            "residue_ids": _read_ids(folder / "vocab.txt") if ids is None else ids,
        }

    @model_validator(mode="after")
    def _weights_have_a_folder(self) -> Self:
        if self.weights == "pretrained" and self.path is None:
            raise ValueError("weights: pretrained ones need path; set path, or weights to random")
        if not self.architecture or "model_type" not in self.architecture:
            raise ValueError("architecture: expected model_type, as in a config.json of transformers")
        return self

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Refuse a missing package, a loss that needs embedded places, and cells that are longer than the positions."""
        if find_spec("transformers") is None:
            raise ValueError("model.family hf needs the package transformers: pip install 'cellmill[hf]'")
        if getattr(objective, "cell_loss_weight", 0):
            raise ValueError(
                "model.family hf embeds places inside its layers, so objective.cell_loss_weight needs 0; set it to 0"
            )
        if tokens.sequences and self.weights == "pretrained" and self.residue_ids is None:
            raise ValueError(
                f"model.path {self.path} has no vocab.txt with one letter a residue; set model.residue_ids, or "
                "model.weights to random"
            )
        needed = {"pad", "mask", *RESIDUES}
        if tokens.sequences and self.residue_ids is not None and (lacking := sorted(needed - self.residue_ids.keys())):
            raise ValueError(f"model.residue_ids: no id of {', '.join(lacking)}; add it, or choose another model")
        if (longest := self.longest) is not None and tokens.max_tokens > longest:
            raise ValueError(
                f"tokens.max_tokens {tokens.max_tokens} exceeds the {longest} places of model.path; set max_tokens to "
                f"{longest}"
            )

    @property
    def longest(self) -> int | None:
        """Most tokens of a cell that the model has positions for; None without a limit."""
        given: dict[str, Any] = self.architecture or {}
        places = given.get("max_position_embeddings", given.get("n_positions"))
        if places is None:
            return None
        ids = self.residue_ids or {}
        offset = given.get("pad_token_id", 1) + 1 if given.get("model_type") in OFFSET_TYPES else 0
        return int(places) - offset - sum(name in ids for name in ("begin", "end"))


def model_folder(path: str, revision: str | None) -> Path:
    """The folder at `path`, or the snapshot of the hub name `path` in the cache. Raises ValueError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser() / f"models--{path.replace('/', '--')}"
    name = revision or "main"
    pointer = cache / "refs" / name
    snapshot = cache / "snapshots" / (pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else name)
    if not snapshot.is_dir():
        raise ValueError(
            f"path: {path!r} is no folder, and revision {name} of a hub model of that name is not in {cache.parent}; "
            f"run: hf download {path}"
        )
    return snapshot


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"path: {path} does not exist; expected a folder that transformers has saved")
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"path: {path} is not JSON ({error})") from None
    if not isinstance(read, dict):
        raise ValueError(f"path: {path}: expected a mapping, got {type(read).__name__}")
    if "auto_map" in read:
        raise ValueError(f"path: {path} asks for remote code (auto_map), which is never run; choose another model")
    return {name: value for name, value in read.items() if name not in IGNORED}


def _read_ids(path: Path) -> dict[str, int] | None:
    """Ids of residues and special tokens in a vocab.txt; None without a file that has all 20 amino acids."""
    if not path.is_file():
        return None
    lines = {line.strip(): number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines())}
    if any(letter not in lines for letter in "ACDEFGHIKLMNPQRSTVWY"):
        return None
    ids = {letter: lines.get(letter, lines.get("X", lines["A"])) for letter in RESIDUES}
    for part, names in SPECIAL_IDS.items():
        ids.update((part, lines[name]) for name in names if name in lines)
    return ids
