"""The torch-free half of an objective: its options, and the tokens and families that it suits."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field

from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin


class ObjectiveConfig(Plugin):
    """Training target of a model, and its loss."""

    kind: ClassVar[str] = "objective"
    default: ClassVar[str | None] = "cell_decoding"
    families: ClassVar[tuple[str, ...]] = ()
    """Families that it serves, beside those that name it in `FamilyConfig.objectives`."""

    needs_counts: ClassVar[bool] = False  # if True, batches have the counts of their tokens
    draws_view: ClassVar[bool] = False  # True where the implementation defines `view`; at most one part of a sum may
    hides_tokens: ClassVar[bool] = True
    """False where `prepare` leaves genes and values as the view has them; at most one part of a sum may hide them."""

    reads_zeros: ClassVar[bool] = False  # True where tokens of genes without counts make sense (`tokens.zero_frac`)
    reads_cells: ClassVar[bool] = True  # False where the loss reads no cell vectors

    name: str = Field(description="Name of the objective.")

    def each(self) -> list["ObjectiveConfig"]:
        """Return this objective, or the parts of a sum."""
        return [self]

    def obs_columns(self) -> dict[str, str]:
        """obs columns whose levels batches carry for it, and the option that names each."""
        return {}

    def number_columns(self) -> dict[str, str]:
        """obs columns whose numbers batches carry for it, and the option that names each."""
        return {}

    def standardised(self, moments: Mapping[str, tuple[float, float]]) -> Self:
        """Return the options with what they take from the training cells: mean and standard deviation by column."""
        return self

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """obs columns whose labels the loss reads: a run that has any is named supervised in cards and tables."""
        return ()

    def counted_columns(self) -> tuple[str, ...]:
        """obs columns whose training cells are counted by level for `fitted`, when a training starts."""
        return ()

    def fitted(self, cells: Mapping[str, Mapping[str, int]]) -> Self:
        """Return the options with what they take from the training cells: their number by column and level."""
        return self

    def gene_columns(self) -> tuple[str, ...]:
        """obs columns whose levels are named after genes that `with_genes` is to be given."""
        return ()

    def with_genes(self, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> Self:
        """Return the options with token ids of genes by column and level, none for levels without a known gene."""
        return self

    def named_levels(self) -> dict[str, tuple[str, list[str]]]:
        """Option that names levels of a column, and these levels, by column: each must be there."""
        return {}

    def warnings(self, option: str = "objective") -> list[str]:
        """Return what `plan` warns of, one line each; `option` is where the options are."""
        return []

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise ValueError when the objective cannot be computed from such tokens."""
