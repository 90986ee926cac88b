"""Section `tokens`, one class per tokenizer, and the special tokens that begin every vocabulary.
Torch-free.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from cellmill.config.plugin import Plugin
from cellmill.config.section import Names

# token ids 0 and 1; the gene in row g of the vocabulary has token g + len(SPECIAL)
SPECIAL = ("<pad>", "<mask>")
RESIDUES = "ABCDEFGHIKLMNOPQRSTUVWXYZ"
"""Amino acids by their letters (IUPAC), in the order of the vocabulary; B, X and Z are ambiguous
ones.
"""
BINS = ("bins", "binning")  # options that edges belong to


class Tokens(Plugin):
    """Contract of a tokenizer's options; see `cellmill.data.stream.tokenizer.Tokenizer` for its
    implementation.
    """

    kind = "tokenizer"
    key = "tokenizer"
    default = "continuous"

    value_kind: ClassVar[Literal["none", "class", "scalar", "place"]]
    """Meaning of a token's value: none, an integer class from 1, a number, or the token's place in
    its cell from 0.
    """
    sequences: ClassVar[bool] = False
    """True if it is for sequences (of a FASTA file), whose tokens are in their own order; else for
    cells.
    """

    tokenizer: str
    max_tokens: int = Field(2048, ge=1)
    """Maximum number of tokens per cell; `truncation` says which genes are cut. A sequence loses
    its end.
    """
    truncation: Literal["top", "random", "variable"] = "top"
    """Which genes a cell with more than max_tokens keeps. top: the highest rank values. random: a
    random sample, new each epoch in training, and fixed by the cell's counts in validation and
    embedding. variable: the genes that vary most over the corpus, which requires
    vocabulary.variability.
    """
    zero_frac: float = Field(0.0, ge=0, lt=1)
    """Fraction of a cell's tokens that are genes without counts, with value 0. They are sampled as
    with truncation random, and count towards max_tokens. There are fewer if the vocabulary has no
    more.
    """
    covariates: Names = Field([])
    """obs columns, or `dataset`: each adds a token before the cell's genes; mean pooling leaves
    these tokens out.
    """
    covariate_unknown_frac: float = Field(0.1, ge=0, le=1)
    """Probability that a covariate of a training cell is replaced by the level of unknown values,
    so that the model also learns that level.
    """

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Same as `Plugin.override`. Edges are left out with other bins."""
        if any(own.get(key, value) != value for key, value in defaults.items() if key in BINS):
            defaults = {key: value for key, value in defaults.items() if key != "edges"}
        return super().override(defaults, own)

    def problems(self) -> Iterator[str]:
        if self.sequences and (self.truncation != "top" or self.zero_frac):
            yield "truncation and zero_frac are for cells; leave them out for sequences"
        if self.zero_frac and self.value_kind not in ("class", "scalar"):
            yield f"zero_frac: tokenizer {self.tokenizer} has no value for a gene without counts; leave it out"

    @property
    def values_are_bins(self) -> bool:
        return self.value_kind == "class"

    @property
    def n_values(self) -> int:
        """Rows of an embedding table of the values (classes or places).

        0 for value kinds none and scalar.
        """
        return 0

    @property
    def needs_quantiles(self) -> bool:
        """True if `fitted` needs quantiles of the corpus."""
        return False

    def fitted(self, quantiles: Sequence[float]) -> Self:
        """These options with values fitted to the corpus, where `needs_quantiles`: to quantiles of
        its nonzero values log(1 + counts per 10,000), at equal steps of probability from 0 to 1.
        """
        return self


class ContinuousTokens(Tokens):
    """Tokens of a gene and its normalised value, log(1 + counts per 10,000)."""

    implementation = "cellmill.data.stream.builtin_tokenizers:ContinuousTokenizer"
    value_kind = "scalar"
    tokenizer: Literal["continuous"] = "continuous"


class BinnedTokens(Tokens):
    """Tokens of a gene and the bin of its count, from 1; 0 is no count."""

    implementation = "cellmill.data.stream.builtin_tokenizers:BinnedTokenizer"
    value_kind = "class"
    tokenizer: Literal["binned"] = "binned"
    bins: int = Field(51, ge=2)
    """Number of bins."""
    binning: Literal["quantile_cell", "uniform", "quantile_corpus"] = "quantile_cell"
    """Bin edges. quantile_cell: quantiles of the cell's counts (scGPT). uniform: equal steps of
    log(1 + counts per 10,000) from 0 to max_value. quantile_corpus: quantiles over the corpus;
    requires vocabulary.quantiles.
    """
    max_value: float = Field(10.0, gt=0)
    """Last edge of binning uniform; larger values are in the last bin."""
    edges: list[float] | None = None
    """Inner edges of binning quantile_corpus, log(1 + counts per 10,000), ascending; null takes
    them from the vocabulary.
    """

    @property
    def n_values(self) -> int:
        return self.bins + 1  # bins count from 1

    @property
    def needs_quantiles(self) -> bool:
        return self.binning == "quantile_corpus" and self.edges is None

    def fitted(self, quantiles: Sequence[float]) -> Self:
        if not self.needs_quantiles:
            return self
        edges = []
        for i in range(1, self.bins):
            position = i / self.bins * (len(quantiles) - 1)
            low = int(position)
            edges.append(quantiles[low] + (position - low) * (quantiles[low + 1] - quantiles[low]))
        return self.model_copy(update={"edges": edges})

    def problems(self) -> Iterator[str]:
        if self.edges is None:
            return
        if self.binning != "quantile_corpus":
            yield f"edges are read with binning quantile_corpus, got {self.binning}; leave edges out"
        if len(self.edges) != self.bins - 1 or any(a > b for a, b in pairwise(self.edges)):
            yield f"edges: expected {self.bins - 1} ascending numbers for {self.bins} bins, or null"


class RankTokens(Tokens):
    """Tokens of a gene and its rank in the cell, sorted by count over corpus median."""

    implementation = "cellmill.data.stream.builtin_tokenizers:RankTokenizer"
    value_kind = "place"
    tokenizer: Literal["rank"] = "rank"

    @property
    def n_values(self) -> int:
        return self.max_tokens


class SequenceTokens(RankTokens):
    """Tokens of a residue of a FASTA file and its position in the sequence."""

    sequences: ClassVar[bool] = True

    tokenizer: Literal["sequence"] = "sequence"  # type: ignore[assignment]
