"""Section `tokens`, one class per tokenizer, and the special tokens that begin every vocabulary. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cellmill.config.plugin import Plugin
from cellmill.config.section import EachOnce

SPECIAL = ("<pad>", "<mask>")  # token ids 0 and 1; the gene in row g of the vocabulary has token g + len(SPECIAL)
RESIDUES = "ABCDEFGHIKLMNOPQRSTUVWXYZ"
"""Amino acids by their letters (IUPAC), in the order of the vocabulary; B, X and Z are ambiguous ones."""


class Tokens(Plugin):
    """Contract of a tokenizer's options; see `cellmill.data.tokens.Tokenizer` for its implementation."""

    kind: ClassVar[str] = "tokenizer"
    key: ClassVar[str] = "tokenizer"
    default: ClassVar[str | None] = "continuous"

    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]]
    """Meaning of a token's value: none, an integer class from 1, a number, or the token's place in its cell from 0."""

    sequences: ClassVar[bool] = False
    """True if it is for sequences (of a FASTA file), whose tokens are in their own order; else for cells."""

    tokenizer: str
    max_tokens: int = Field(
        2048,
        ge=1,
        description="Most tokens of a cell; those with the lowest rank value are cut; of a sequence, its end.",
    )
    covariates: Annotated[list[str], EachOnce] = Field(
        [],
        description="obs columns, or `dataset`, of which each cell has a token before its genes; the cell's vector "
        "leaves these tokens out of its mean.",
    )
    covariate_unknown_frac: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability with which a covariate of a training cell is replaced by the unknown level, which "
        "cells have when a file lacks the column or the corpus the value.",
    )

    @property
    def n_values(self) -> int:
        """Rows of an embedding table of the values (classes or places); 0 for value kinds none and scalar."""
        return 0


class ContinuousTokens(Tokens):
    """Tokens of a gene and log(1 + counts per 10,000)."""

    implementation: ClassVar[str] = "cellmill.data.tokenizers.continuous:ContinuousTokenizer"
    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]] = "scalar"

    tokenizer: Literal["continuous"] = Field("continuous", description="Value: log(1 + counts per 10,000).")


class BinnedTokens(Tokens):
    """Tokens of a gene and the quantile bin of its count."""

    implementation: ClassVar[str] = "cellmill.data.tokenizers.binned:BinnedTokenizer"
    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]] = "class"

    tokenizer: Literal["binned"] = Field("binned", description="Value: quantile bin of the count within the cell.")
    bins: int = Field(51, ge=2, description="Number of bins.")

    @property
    def n_values(self) -> int:
        return self.bins + 1  # bins count from 1


class RankTokens(Tokens):
    """Tokens of a gene and its place in the cell."""

    implementation: ClassVar[str] = "cellmill.data.tokenizers.rank:RankTokenizer"
    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]] = "place"

    tokenizer: Literal["rank"] = Field(
        "rank", description="Value: place of the gene in the cell, sorted by count over corpus median."
    )

    @property
    def n_values(self) -> int:
        return self.max_tokens


class SequenceTokens(Tokens):
    """Tokens of a residue and its place in the sequence."""

    # the places of residues that stand in sequence order are those of genes that stand in rank order
    implementation: ClassVar[str] = "cellmill.data.tokenizers.rank:RankTokenizer"
    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]] = "place"
    sequences: ClassVar[bool] = True

    tokenizer: Literal["sequence"] = Field(
        "sequence", description="Residues of a FASTA file, in their order. Value: place in the sequence."
    )

    @property
    def n_values(self) -> int:
        return self.max_tokens
