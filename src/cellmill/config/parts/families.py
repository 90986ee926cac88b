"""Options of the built-in model families. Torch-free.

The folder of `hf` is read together with the configuration: `architecture` and `residue_ids` then
hold everything in it but the weights, so checkpoints and exported models need neither the folder
nor a network.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from cellmill.config.parts.family import (
    FamilyConfig,
    GeneVectorsConfig,
    PostNormConfig,
    ResidualConfig,
    TransformerConfig,
)
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import RESIDUES, Tokens
from cellmill.config.published import read_mapping
from cellmill.errors import DataError

SPECIAL_IDS = {
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
    "begin": ("<cls>", "[CLS]", "<s>"),
    "end": ("<eos>", "[SEP]", "</s>"),
}
"""Names of the special tokens in a vocab.txt, by their part in a sequence."""
IGNORED = (
    "architectures",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
    "_name_or_path",
    "transformers_version",
)
"""Keys of a config.json that define nothing here: weights are float32, heads are the objective's.
"""
OFFSET_TYPES = ("esm", "roberta", "xlm-roberta", "camembert")
"""Types of models whose positions count from pad_token_id + 1."""


class EncoderConfig(GeneVectorsConfig, TransformerConfig):
    """A pre-norm transformer encoder whose tokens attend to all tokens of their cell."""

    implementation = "cellmill.models.families.encoder:EncoderModel"
    value_kinds = ("class", "scalar", "place")
    reads_token_order = False
    objectives: ClassVar[tuple[str, ...]] = (
        "cell_decoding",
        "denoise",
        "query_decoding",
        "masked_value",
        "masked_gene",
        "supervised_contrastive",
        "perturbation_response",
    )
    covariates = True
    family: Literal["encoder"] = "encoder"
    pooling: Literal["mean", "cls", "attention"] = "mean"
    """Cell embedding: mean of its tokens' states, the state of a learned token before them (cls),
    or their mean weighted by a learned query (attention). Objectives that do not read the embedding
    require mean.
    """

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        if self.pooling != "mean" and tokens.covariates:
            raise ValueError(
                f"model.pooling {self.pooling}: tokens.covariates requires pooling mean; set one of them"
            )
        if self.pooling != "mean" and not any(part.reads_cells for part in objective.all_parts()):
            raise ValueError(
                f"model.pooling {self.pooling}: the objective does not read the cell's vector; set mean"
            )


class AutoregressiveConfig(TransformerConfig):
    """A pre-norm transformer whose tokens, in rank order, attend to earlier ones of their cell, to
    generate cells.
    """

    implementation = "cellmill.models.families.autoregressive:AutoregressiveModel"
    value_kinds = ("none", "class", "scalar", "place")
    objectives = ("next_gene",)
    family: Literal["autoregressive"] = "autoregressive"
    layers: int = Field(4, ge=0)
    """Transformer blocks; with 0 a gene depends only on the gene before it."""
    pooling: Literal["mean", "last"] = "mean"
    """Cell embedding: mean of its tokens' states, or the state of its last token."""

    def table_rows(self, tokens: Tokens) -> dict[str, Any]:
        """Ranks share rows by their number of bits."""
        return super().table_rows(tokens) | {"max_tokens": tokens.max_tokens.bit_length()}


class BertFamilyConfig(PostNormConfig):
    """BERT over genes in rank order, like Geneformer: embeddings, then post-norm blocks. The
    command import converts Geneformer's weights to one.
    """

    implementation = "cellmill.models.families.post_norm:BertModel"
    value_kinds = ("place",)
    family: Literal["bert"] = "bert"


class ScgptConfig(PostNormConfig):
    """scGPT: a normed gene embedding plus a normed MLP of the bin index, then post-norm blocks; the
    cell embedding is normalised to length 1. The command import converts scGPT's weights to one.
    """

    implementation = "cellmill.models.families.post_norm:ScgptModel"
    value_kinds = ("class",)
    reads_token_order = False
    objectives = (*PostNormConfig.objectives, "masked_value", "perturbation_response")
    family: Literal["scgpt"] = "scgpt"
    cls_value: float = 0.0
    """Value of the token <cls>; scGPT's pad_value."""


class ProfileConfig(GeneVectorsConfig, ResidualConfig):
    """An MLP on the expression profile, without attention: fast, and the small model that a
    transformer has to beat.
    """

    implementation = "cellmill.models.families.encoder:ProfileModel"
    value_kinds = ("scalar",)
    reads_token_order = False
    objectives = (
        "cell_decoding",
        "denoise",
        "query_decoding",
        "supervised_contrastive",
        "perturbation_response",
    )
    weight_keys = ("family", "hidden", "layers", "ffn_width")
    sequence_parallel = False
    family: Literal["profile"] = "profile"
    layers: int = Field(2, ge=0)
    """Feed-forward blocks."""

    def tp_sizes(self) -> dict[str, int]:
        """Feed-forward layers are cut by their width; the vocabulary can be cut anywhere."""
        return {"model.ffn_hidden": self.ffn_width}


class HfConfig(FamilyConfig):
    """An encoder or causal model of the transformers library, such as ESM-2, from its config.json.
    Cells of a micro-batch are padded to the longest. Dropout is off, and remote code is never run.
    """

    implementation = "cellmill.models.families.hf:HfModel"
    value_kinds = ("none", "place")
    objectives = ("masked_gene", "cell_decoding", "supervised_contrastive")
    compiles = False
    pads_cells = True
    weight_keys = ("family", "architecture", "residue_ids")
    family: Literal["hf"] = "hf"
    path: str | None = None
    """Folder with config.json, vocab.txt for residues, and *.safetensors; or the name of a Hugging
    Face hub model in this machine's cache (`hf download NAME`); null if architecture is given.
    """
    revision: str | None = None
    """Revision of a hub name: a branch, tag or commit; null is main."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Initial weights: those of the folder, or random ones, with the config's initializer range."""
    architecture: dict[str, Any] | None = None
    """Contents of a config.json; null reads path's."""
    residue_ids: dict[str, int] | None = None
    """Token id of each residue, and of `pad`, `mask`, `begin` and `end`; null reads the vocab.txt
    of path. Without one, tokens are numbered as in the corpus.
    """

    @model_validator(mode="before")
    @classmethod
    def _read_folder(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("architecture") is not None:
            return given
        path = given.get("path")
        if path is None:
            raise ValueError(
                "path: expected a folder with config.json, or a hub name; or set architecture"
            )
        folder = model_folder(path, given.get("revision"))
        ids = given.get("residue_ids")
        try:
            read = read_mapping(folder / "config.json")
        except DataError as error:
            raise ValueError(
                f"path: {error}; expected a folder that transformers has saved"
            ) from None
        if "auto_map" in read:
            raise ValueError(
                f"path: {folder} asks for remote code (auto_map), which is never run; choose another"
            )
        if ids is None and (file := folder / "vocab.txt").is_file():
            lines = {
                line.strip(): number
                for number, line in enumerate(file.read_text(encoding="utf-8").splitlines())
            }
            if all(letter in lines for letter in "ACDEFGHIKLMNPQRSTVWY"):
                ids = {letter: lines.get(letter, lines.get("X", lines["A"])) for letter in RESIDUES}
                for part, names in SPECIAL_IDS.items():
                    ids.update((part, lines[name]) for name in names if name in lines)
        kept = {name: value for name, value in read.items() if name not in IGNORED}
        return given | {"architecture": kept, "residue_ids": ids}

    def problems(self) -> Iterator[str]:
        if self.weights == "pretrained" and self.path is None:
            yield "weights: pretrained ones need path; set path, or weights to random"
        if not self.architecture or "model_type" not in self.architecture:
            yield "architecture: expected model_type, as in a config.json of transformers"

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        if find_spec("transformers") is None:
            raise ValueError(
                "model.family hf needs the package transformers: pip install 'cellmill[hf]'"
            )
        for where, part in objective.named_parts().items():
            if getattr(part, "cell_loss_weight", 0):
                raise ValueError(
                    f"{where}.cell_loss_weight: family hf embeds places inside its layers; set it to 0"
                )
        if tokens.sequences and self.weights == "pretrained" and self.residue_ids is None:
            raise ValueError(
                f"model.path {self.path}: no vocab.txt with a letter per residue; set model.residue_ids"
            )
        lacking = []
        if tokens.sequences and self.residue_ids is not None:
            lacking = sorted({"pad", "mask", *RESIDUES} - self.residue_ids.keys())
        if lacking:
            raise ValueError(
                f"model.residue_ids: no id of {', '.join(lacking)}; add it, or choose another model"
            )
        given = self.architecture or {}
        places = given.get("max_position_embeddings", given.get("n_positions"))
        if places is None:
            return
        offset = given.get("pad_token_id", 1) + 1 if given.get("model_type") in OFFSET_TYPES else 0
        n_ends = len({"begin", "end"} & (self.residue_ids or {}).keys())
        longest = int(places) - offset - n_ends
        if tokens.max_tokens > longest:
            raise ValueError(
                f"tokens.max_tokens: expected at most {longest} for model.path, got {tokens.max_tokens}"
            )


CACHE_VARIABLES = {
    "XDG_CACHE_HOME": "",
    "HF_HOME": "/huggingface",
    "HUGGINGFACE_HUB_CACHE": "/hub",
    "HF_HUB_CACHE": "",
}
"""Variables that name the cache of the hub, the last one counts; what each adds to the one before."""


def model_folder(path: str, revision: str | None) -> Path:
    """The folder at `path`, or the snapshot of the hub name `path` in the cache. Raise ValueError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    # as the package huggingface_hub finds it
    hub = "~/.cache"
    for name, default in CACHE_VARIABLES.items():
        hub = os.environ.get(name, hub + default)
    cache = Path(os.path.expandvars(hub)).expanduser() / f"models--{path.replace('/', '--')}"
    name = revision or "main"
    pointer = cache / "refs" / name
    commit = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else name
    snapshot = cache / "snapshots" / commit
    if not snapshot.is_dir():
        raise ValueError(
            f"path: {path!r} is no folder, and {snapshot} does not exist; run: hf download {path}"
        )
    return snapshot


class AutoencoderConfig(EncoderConfig):
    """A transformer encoder of the visible genes, whose pooled states pass through a bottleneck:
    the cell embedding. The objective, query_decoding or cell_decoding, provides the decoder.
    """

    implementation = "cellmill.models.families.encoder:AutoencoderModel"
    objectives = (
        "query_decoding",
        "cell_decoding",
        "supervised_contrastive",
        "perturbation_response",
    )
    weight_keys = (*EncoderConfig.weight_keys, "latent")
    family: Literal["autoencoder"] = "autoencoder"  # type: ignore[assignment]
    latent: int | None = Field(64, ge=1)
    """Width of the bottleneck, and so of the embedding; null is hidden, without a bottleneck."""
