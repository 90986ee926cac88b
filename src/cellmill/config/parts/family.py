"""The torch-free half of a model family: its options, how layouts may cut the model, and options
that families share.

Sizes by name stand for hyper-parameters. 51M is scGPT's width and depth (Cui et al. 2024), 106M is
Geneformer V2-104M's (Chen et al. 2024); as in both, every head is 64 wide.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin
from cellmill.config.section import Section

SizeName = Literal["10M", "51M", "106M", "300M", "1B", "3B"]
SIZES: dict[str, dict[str, int]] = {
    "10M": {"hidden": 256, "layers": 6, "heads": 4},
    "51M": {"hidden": 512, "layers": 12, "heads": 8},
    "106M": {"hidden": 768, "layers": 12, "heads": 12},
    "300M": {"hidden": 1024, "layers": 22, "heads": 16},
    "1B": {"hidden": 1792, "layers": 24, "heads": 28},
    "3B": {"hidden": 2816, "layers": 30, "heads": 44},
}
"""Options that a size stands for, with a feed-forward width of 4 * hidden."""
WEIGHTS_FORMAT = 2
"""What the numbers in a parameter mean; increased when parameters keep name and shape but change
meaning.

1: rows of `qkv` are all queries, then all keys, then all values. 2: rows of a head are together.
"""


class GeneVectorsConfig(Section):
    """Pretrained gene vectors from a file, for example of a protein or text model."""

    gene_vectors: str | None = None
    """File with a vector per gene, named by Ensembl id or symbol. NAME.npy has shape (genes, dim),
    and NAME.genes.txt has the names, one per line. A .safetensors file has a tensor per name; a
    .tsv or .csv has a gene and its numbers per line. A learned projection of the vector is added to
    the gene's learned embedding. A gene without a vector has only its learned embedding.
    """
    gene_vector_dim: int | None = Field(None, ge=1)
    """Dimension of the vectors; null means no vectors. Without a file the vectors are those of
    init_from.
    """
    train_gene_vectors: bool = False
    """Also train the vectors; otherwise only their projection."""

    def problems(self) -> Iterator[str]:
        if self.gene_vector_dim is None and (
            self.gene_vectors is not None or self.train_gene_vectors
        ):
            yield "gene_vectors and train_gene_vectors require gene_vector_dim, the numbers of each vector; set it"


class FamilyConfig(Plugin):
    """Base of every family's options."""

    kind = "family"
    key = "family"
    default = "encoder"

    family: str
    weight_keys: ClassVar[tuple[str, ...]] = ()  # options that must equal the `init_from` model's
    # kinds of token values (`Tokens.value_kind`) that the family can embed
    value_kinds: ClassVar[tuple[str, ...]] = ()
    # whether its output depends on the order of a cell's tokens. If so, tokens are in rank order;
    # if not, reading shards with `order: genes` skips most sorts
    reads_token_order: ClassVar[bool] = True
    # whether the rows that pass from block to block are tokens
    sequence_parallel: ClassVar[bool] = True
    # whether its blocks have methods that `parallel.compile` can compile
    compiles: ClassVar[bool] = True
    # whether the cells of a micro-batch are padded to the longest
    pads_cells: ClassVar[bool] = False
    # whether cells may have tokens of obs columns before their genes
    covariates: ClassVar[bool] = False
    objectives: ClassVar[tuple[str, ...]] = ()
    """Objectives that can train the family, in addition to those whose `families` lists it."""

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Same as `Plugin.override`.

        A run's own `size` or `path` replaces the options that it stands for.
        """
        replaced: tuple[str, ...] = ()
        if own.get("size") not in (None, "null"):
            replaced = ("hidden", "layers", "heads", "ffn_hidden")
        if own.get("path") not in (None, "null", defaults.get("path")):
            replaced = ("revision", "architecture", "residue_ids")
        defaults = {key: value for key, value in defaults.items() if key not in replaced}
        return super().override(defaults, own)

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Raise ValueError when the family cannot train on the objective, or read such tokens, with
        its options.
        """

    def table_rows(self, tokens: Tokens) -> dict[str, Any]:
        """Options of section tokens that give tables their number of rows, each with that number,
        which must equal the `init_from` model's.
        """
        return {"bins": getattr(tokens, "bins", None)} if tokens.values_are_bins else {}

    def tp_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallel must divide, by the option's name; empty if not supported."""
        return {}

    def pp_sizes(self) -> dict[str, int]:
        """Number of blocks that a pipeline divides into stages, by the option's name.

        Empty if not supported.
        """
        return {}


class ResidualConfig(FamilyConfig):
    """Architecture of a stack of blocks along a residual stream."""

    hidden: int = Field(256, ge=8)
    """Width of the residual stream."""
    layers: int
    ffn_hidden: int | None = Field(None, ge=1)
    """Width inside the feed-forward layers; null is 4 * hidden."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the residual branches, the same in every layout."""

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden


class TransformerConfig(ResidualConfig):
    """Architecture of a stack of transformer blocks."""

    weight_keys: ClassVar[tuple[str, ...]] = ("family", "hidden", "layers", "heads", "ffn_width")

    size: SizeName | None = Field(None, exclude=True)
    """Named size (docs/objectives.md): sets hidden, layers and heads if they are not given."""
    layers: int = Field(4, ge=0)
    """Transformer blocks; 0 leaves the embeddings and a norm."""
    heads: int = Field(4, ge=1)
    """Attention heads; hidden must be a multiple of it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, value: Any) -> Any:
        # before validation, so that a run by name is the run with these numbers
        numbers = SIZES.get(str(value.get("size"))) if isinstance(value, dict) else None
        if numbers is None:
            return value
        return numbers | {key: option for key, option in value.items() if key != "size"}

    def table_rows(self, tokens: Tokens) -> dict[str, Any]:
        rows = super().table_rows(tokens)
        return rows | {"max_tokens": tokens.max_tokens} if tokens.value_kind == "place" else rows

    def problems(self) -> Iterator[str]:
        if self.hidden % self.heads:
            yield f"hidden: {self.hidden} is not a multiple of heads = {self.heads}"

    def tp_sizes(self) -> dict[str, int]:
        """Attention is cut by whole heads, feed-forward by its width.

        The vocabulary can be cut anywhere.
        """
        return {"model.heads": self.heads, "model.ffn_hidden": self.ffn_width}

    def pp_sizes(self) -> dict[str, int]:
        """A pipeline can be cut between any two blocks."""
        return {"model.layers": self.layers}


class PostNormConfig(TransformerConfig):
    """Architecture of post-norm blocks, and the pooling."""

    objectives: ClassVar[tuple[str, ...]] = (
        "cell_decoding",
        "masked_gene",
        "supervised_contrastive",
    )
    weight_keys = (*TransformerConfig.weight_keys, "activation", "norm_eps", "ends")

    layers: int = Field(6, ge=1)
    """Transformer blocks."""
    activation: Literal["gelu", "relu"] = "relu"
    """Activation inside the feed-forward layers."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of the layer norms."""
    ends: Literal["none", "cls", "cls_eos"] = "none"
    """Special tokens added to each cell: none; <cls> at its start; or also <eos> at its end."""
    pooling: Literal["mean", "cls"] = "mean"
    """Cell embedding: mean over its genes, without <cls> and <eos>, or the state of <cls>."""
    embed_layer: int = Field(0, le=0)
    """Block whose output is pooled: 0 is the last, -1 the one before. Objectives that predict from the
    embedding require 0; masked_gene and masked_value do not.
    """

    def problems(self) -> Iterator[str]:
        if self.pooling == "cls" and self.ends == "none":
            yield "pooling: cls needs the token <cls>; set ends to cls or cls_eos, or pooling to mean"
        if -self.embed_layer > self.layers:
            yield f"embed_layer: expected at least {-self.layers} with layers = {self.layers}, got {self.embed_layer}"

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        if not self.embed_layer:
            return
        for part in objective.all_parts():
            # heads read the vectors that `embed` writes; only training reads those of masked tokens
            if part.reads_cells and not part.owns_tokens:
                raise ValueError(
                    f"model.embed_layer: expected 0 with objective {part.name}, which is trained on vectors of the "
                    f"last block, got {self.embed_layer}; set it to 0"
                )

    @property
    def n_ends(self) -> int:
        """Tokens added to each cell."""
        return {"none": 0, "cls": 1, "cls_eos": 2}[self.ends]
