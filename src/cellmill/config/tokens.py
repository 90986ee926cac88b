"""Section `tokens`, and the special tokens that every vocabulary begins with. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cellmill.config.section import Section

SPECIAL = ("<pad>", "<mask>")
"""Token ids 0 and 1; the gene in row g of the vocabulary has token g + len(SPECIAL)."""


class Tokens(Section):
    """How a cell becomes tokens."""

    tokenizer: Literal["rank", "binned", "continuous"] = Field(
        "continuous",
        description="Beside its gene a token carries: rank, its place in the cell ordered by count over corpus median; "
        "binned, the quantile bin of its count within the cell; continuous, log(1 + counts per 10,000).",
    )
    max_tokens: int = Field(
        2048, ge=1, description="A cell's tokens beyond so many, the lowest by rank value, are cut."
    )
    bins: int = Field(51, ge=2, description="Number of value bins of the binned tokenizer.")
