"""The torch-free half of an objective (`models/objective.py`): its options, and what they read and
suit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from pydantic import Field

from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin, refuse_former_names
from cellmill.config.section import Section

FORMER_NAMES = {"hides_tokens": "owns_tokens", "each": "all_parts"}


@dataclass(frozen=True)
class Columns:
    """obs columns that batches carry for an objective, with the option that names each."""

    levels: dict[str, str] = field(default_factory=dict)  # columns of `Batch.levels`
    numbers: dict[str, str] = field(default_factory=dict)  # columns of `Batch.numbers`
    named: Sequence[tuple[str, str, Sequence[str]]] = ()
    """(option, column, levels that the option names): each level must exist."""

    def __or__(self, other: Self) -> "Columns":
        return Columns(
            {**self.levels, **other.levels},
            {**self.numbers, **other.numbers},
            (*self.named, *other.named),
        )


class TeacherVectors(Section):
    """A teacher and its vectors (`data.shards.index`)."""

    width: int = Field(ge=1)
    """Numbers of a vector."""
    sha256: str
    """Digest of the vectors."""
    shards: str
    """Fingerprint of the shards of their cells."""
    model: str
    """Digest of the teacher's weights; empty for vectors of another package."""
    supervised_by: list[str]
    """obs columns whose labels the teacher was trained with."""


class Facts(Protocol):
    """What options can take from a corpus when a training starts; files are read on each call."""

    def cells_by_level(self, column: str) -> Mapping[str, int]:
        """Number of training cells of each level, without cells of no value.

        Empty for a column that the corpus lacks, or that has no levels.
        """

    def cells_by_levels(self, column: str, other: str) -> Mapping[tuple[str, str], int]:
        """Number of training cells of each pair of levels, without cells that lack either."""

    def moments(self, column: str) -> tuple[float, float]:
        """Mean and standard deviation of a column of numbers.

        A number that float32 cannot hold counts as missing. Raise ConfigError if all numbers are equal.
        """

    def genes(self, column: str) -> Mapping[str, Sequence[int]]:
        """Token ids of the genes that each level is named after, none for a level without a known
        gene.
        """

    def teacher(self) -> TeacherVectors:
        """What is known of the teacher.

        Raise UserError if its vectors are missing, damaged or of other shards.
        """


class ObjectiveConfig(Plugin):
    """Training target of a model, and its loss."""

    kind = "objective"
    default = "cell_decoding"
    families: ClassVar[tuple[str, ...]] = ()
    """Families that it can train, in addition to those that list it in `FamilyConfig.objectives`.

    A plug-in objective names the built-in families that it suits here.
    """
    needs_counts: ClassVar[bool] = False
    """True if the objective reads `Batch.counts`.

    In a `sum` with a part that draws a view, these are the counts in the view.
    """
    draws_view: ClassVar[bool] = False
    """True if the implementation defines `view`; at most one part of a sum may."""
    owns_tokens: ClassVar[bool] = True
    """True if `prepare` hides tokens, or the loss reads the model's tokens as targets (next_gene).

    At most one part of a sum may.
    """
    reads_zeros: ClassVar[bool] = False
    """True if tokens of genes without counts make sense (`tokens.zero_frac`)."""
    reads_cells: ClassVar[bool] = True
    """False if the loss does not read `Model.cell_vectors`.

    Families that have option `pooling` then accept only mean.
    """
    label_option: ClassVar[str | None] = None
    """Option that holds the obs column whose labels the loss reads; None for no labels.

    `supervised_by` lists the column, so cards and tables name the run supervised.
    """

    # declared, so that pydantic lets a subclass set it and `FORMER_NAMES` can refuse it
    hides_tokens: ClassVar[bool]

    name: str

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        super().__pydantic_init_subclass__(**arguments)
        refuse_former_names(cls, FORMER_NAMES)

    def named_parts(self, option: str = "objective") -> Mapping[str, "ObjectiveConfig"]:
        """Return this objective, or the parts of a sum, by the option that holds it.

        `option` is where the options of this objective are.
        """
        return {option: self}

    def all_parts(self) -> list["ObjectiveConfig"]:
        """Return this objective, or the parts of a sum."""
        return [*self.named_parts().values()]

    def columns(self, option: str = "objective") -> Columns:
        """Return the obs columns that batches carry for it; `option` is where the options are."""
        return Columns()

    def stream(self) -> dict[str, Any]:
        """Return defaults of section `stream`, which include `weight_by`.

        A run that sets `weight_by` takes none of them; otherwise options that it sets win.
        """
        return {}

    def choose_columns(self, facts: Facts, labels: Sequence[str]) -> Self:
        """Return the options with the obs columns that they take from the corpus.

        `labels` are columns whose labels the run reads. Called before `columns` and `fit` are.
        """
        return self

    def choices(self) -> dict[str, str]:
        """Return what `choose_columns` took and why, as text by name; `plan` and `train` print it."""
        return {}

    def fit(self, facts: Facts) -> Self:
        """Return the options with what they take from the corpus: the run stores the result."""
        return self

    @property
    def supervised_by(self) -> tuple[str, ...]:
        """obs columns whose labels the loss reads: a run that has any is named supervised in cards
        and tables.
        """
        return () if self.label_option is None else (getattr(self, self.label_option),)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Runs or folders of the teachers whose vectors batches carry: at most one."""
        return ()

    def warnings(self, option: str = "objective") -> list[str]:
        """Return what `plan` warns of, one line each; `option` is where the options are."""
        return []

    def check_tokens(self, tokens: Tokens) -> None:
        """Raise ValueError when the objective cannot be computed from such tokens."""
