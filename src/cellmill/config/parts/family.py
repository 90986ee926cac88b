"""The torch-free half of a model family: its options, how layouts may cut the model, and options that families share.

Shared options are those of transformer blocks, of post-norm blocks (`bert` and `scgpt`), of gene embeddings that start
from given vectors of genes, and sizes by name, which stand for hyper-parameters. 51M is scGPT's width and depth (Cui et
al. 2024), 106M is Geneformer V2-104M's (Chen et al. 2024); as in both, every head is 64 wide.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, cast, get_args

from pydantic import Field, model_validator

from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin
from cellmill.config.section import Section


class GeneVectorsConfig(Section):
    """Pretrained gene vectors from a file, for example of a protein or text model."""

    gene_vectors: str | None = None
    """File with a vector per gene, by Ensembl id or symbol: .npy with shape (genes, dim) and the names, one per line,
    in the file of the same name with .genes.txt in place of .npy; .safetensors with a tensor per name; or .tsv or .csv
    with a gene and its numbers per line. The vector is projected by a learned matrix and added to the gene's learned
    embedding; a gene without a vector has only the learned embedding."""
    gene_vector_dim: int | None = Field(None, ge=1)
    """Dimension of the vectors; null means no vectors. Without a file the vectors are those of init_from."""
    train_gene_vectors: bool = False
    """Also train the vectors; otherwise only their projection is trained."""

    def problems(self) -> Iterator[str]:
        if self.gene_vector_dim is None and (self.gene_vectors is not None or self.train_gene_vectors):
            yield "gene_vectors requires gene_vector_dim, the numbers of each vector; set it"


SizeName = Literal["10M", "51M", "106M", "300M", "1B", "3B"]
HIDDEN_AND_LAYERS: dict[SizeName, tuple[int, int]] = {
    "10M": (256, 6),
    "51M": (512, 12),
    "106M": (768, 12),
    "300M": (1024, 22),
    "1B": (1792, 24),
    "3B": (2816, 30),
}
HEAD_WIDTH = 64
KEYS = ("hidden", "layers", "heads", "ffn_hidden")
"""Options that a size stands for; a feed-forward width of null is 4 * hidden."""


def numbers(size: SizeName) -> dict[str, int]:
    """Options that `size` stands for."""
    hidden, layers = HIDDEN_AND_LAYERS[size]
    return {"hidden": hidden, "layers": layers, "heads": hidden // HEAD_WIDTH}


def expanded(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the numbers of their `size` in its place, where they do not set them; an unknown size stays."""
    size = options.get("size")
    if size not in get_args(SizeName):
        return options
    return numbers(cast(SizeName, size)) | {key: value for key, value in options.items() if key != "size"}


def replaced(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`defaults` without the options that a size among a run's `own` stands for."""
    if own.get("size") in (None, "null"):
        return defaults
    return {key: value for key, value in defaults.items() if key not in KEYS}


WEIGHTS_FORMAT = 2
"""What the numbers in a parameter mean; increased when parameters keep name and shape but change meaning.

1: rows of `qkv` are all queries, then all keys, then all values. 2: rows of a head are together.
"""


class FamilyConfig(Plugin):
    """Base of every family's options."""

    kind: ClassVar[str] = "family"
    key: ClassVar[str] = "family"
    default: ClassVar[str | None] = "encoder"

    family: str
    weight_keys: ClassVar[tuple[str, ...]] = ()  # options that must equal the `init_from` model's
    token_keys: ClassVar[tuple[str, ...]] = ()  # options of section tokens too, besides the tokenizer
    value_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of token values (`Tokens.value_kind`) that the family can embed
    sequence_parallel: ClassVar[bool] = True  # whether the rows that pass from block to block are tokens
    compiles: ClassVar[bool] = True  # whether its blocks have methods that `parallel.compile` can compile
    covariates: ClassVar[bool] = False  # whether cells may have tokens of obs columns before their genes
    objectives: ClassVar[tuple[str, ...]] = ()
    """Objectives that the family serves, in addition to those whose `families` lists this family."""

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """As `Plugin.override`; a run's own `size` replaces the numbers at the top that it stands for."""
        return super().override(replaced(defaults, own), own)

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Raise ValueError when the family cannot train on the objective, or read such tokens, with its options."""

    def tp_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallel must divide, by the option's name; empty if not supported."""
        return {}

    def pp_sizes(self) -> dict[str, int]:
        """Number of blocks that a pipeline divides into stages, by the option's name; empty if not supported."""
        return {}


class SizedFamilyConfig(FamilyConfig):
    """Base of families that have `hidden`, `layers`, `heads` and `ffn_hidden`, which a name of a size may set.

    A size is replaced by its numbers before they are validated: a run by name is the run with these numbers.
    """

    size: SizeName | None = Field(None, exclude=True)
    """Named size (docs/objectives.md): sets hidden, layers and heads if they are not given."""

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, value: Any) -> Any:
        return expanded(value) if isinstance(value, dict) else value


class TransformerConfig(SizedFamilyConfig):
    """Architecture of a stack of transformer blocks."""

    weight_keys: ClassVar[tuple[str, ...]] = ("family", "hidden", "layers", "heads", "ffn_width")

    hidden: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(4, ge=0, description="Transformer blocks; 0 leaves the embeddings and a norm.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden must be a multiple of it.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")

    def problems(self) -> Iterator[str]:
        if self.hidden % self.heads:
            yield f"hidden: {self.hidden} is not a multiple of heads = {self.heads}"

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def tp_sizes(self) -> dict[str, int]:
        """Attention is cut by whole heads, feed-forward by its width; the vocabulary can be cut anywhere."""
        return {"model.heads": self.heads, "model.ffn_hidden": self.ffn_width}

    def pp_sizes(self) -> dict[str, int]:
        """A pipeline can be cut between any two blocks."""
        return {"model.layers": self.layers}


class PostNormConfig(TransformerConfig):
    """Architecture of post-norm blocks, and the pooling."""

    objectives: ClassVar[tuple[str, ...]] = ("cell_decoding", "masked_value", "masked_gene", "supervised_contrastive")
    weight_keys: ClassVar[tuple[str, ...]] = (*(*TransformerConfig.weight_keys, "activation", "norm_eps", "ends"),)

    layers: int = Field(6, ge=1, description="Transformer blocks.")
    activation: Literal["gelu", "relu"] = Field("relu", description="Activation inside the feed-forward layers.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the layer norms.")
    ends: Literal["none", "cls", "cls_eos"] = "none"
    """Special tokens added to each cell: none; <cls> at its start; or also <eos> at its end."""
    pooling: Literal["mean", "cls"] = "mean"
    """Cell embedding: mean over its genes, without <cls> and <eos>, or the state of <cls>."""
    embed_layer: int = Field(0, le=0)
    """Block whose output is pooled when cells are embedded: 0 is the last, -1 the one before."""

    def problems(self) -> Iterator[str]:
        if self.pooling == "cls" and self.ends == "none":
            yield "pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean"
        if -self.embed_layer > self.layers:
            yield f"embed_layer: expected at least {-self.layers} with layers = {self.layers}"

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        if self.embed_layer and any(part.name == "classification" for part in objective.each()):
            raise ValueError(
                f"model.embed_layer {self.embed_layer}: objective classification predicts labels from the last block; "
                "set embed_layer to 0"
            )

    @property
    def n_ends(self) -> int:
        """Tokens added to each cell."""
        return {"none": 0, "cls": 1, "cls_eos": 2}[self.ends]
