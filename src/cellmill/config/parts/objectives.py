"""Options of the built-in objectives. Torch-free. They are in one file, because most share a base class
and are little more than a table.

`problems` of every base class runs too (`Section`), so none calls super(). An objective without
`families` is listed in `FamilyConfig.objectives`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial, reduce
from itertools import chain
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    WithJsonSchema,
    create_model,
    model_validator,
)

from cellmill.config import plugin
from cellmill.config.parts.batch import ADVERSARY, AUTO, MIN_BATCH_CELLS, choose_batch
from cellmill.config.parts.objective import Columns, Facts, ObjectiveConfig, TeacherVectors
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import leaving_out

EMBEDDING_FAMILIES = ("profile", "encoder", "autoencoder", "autoregressive", "bert", "scgpt", "hf")
"""The built-in families: each gives cell vectors, which heads read."""


class MaskedObjectiveConfig(ObjectiveConfig):
    """Options that both masked objectives share."""

    reads_zeros = True

    mask_frac: float = Field(0.15, gt=0, lt=1)
    """Probability with which each token is masked; at least one per cell is."""
    random_frac: float = Field(0.0, ge=0, lt=1)
    """Probability that training replaces a masked token instead of hiding it: by a random gene of
    the vocabulary, or the value of a random visible gene of the cell. BERT uses 0.1.
    """
    keep_frac: float = Field(0.0, ge=0, lt=1)
    """Probability that training shows a masked token unchanged. BERT uses 0.1."""
    cell_loss_weight: float = Field(1.0, ge=0)
    """Weight of a second loss: predict masked tokens from the cell embedding (scGPT's GEPC). 0
    turns it off.
    """

    def problems(self) -> Iterator[str]:
        shown = self.random_frac + self.keep_frac
        if shown >= 1:
            yield f"random_frac + keep_frac = {shown:g} hides none of the masked tokens; lower one of them"

    @property
    def reads_cells(self) -> bool:  # type: ignore[override]
        return self.cell_loss_weight > 0


class MaskedValueConfig(MaskedObjectiveConfig):
    """Predict the values of masked tokens; their genes stay visible."""

    implementation = "cellmill.models.objectives.masked_value:MaskedValue"
    name: Literal["masked_value"] = "masked_value"
    renormalize: bool = False
    """Compute values of visible tokens only from visible counts; set it to yes in new runs.
    Otherwise they leak the answer: a cell's values sum to 10,000 counts, so the visible values
    reveal the sum of the hidden values, and bins shift with hidden counts. The values to predict
    are those of the whole cell. no reproduces earlier runs.
    """

    @property
    def needs_counts(self) -> bool:  # type: ignore[override]
        return self.renormalize

    def warnings(self, option: str = "objective") -> list[str]:
        leak = (
            f"set {option}.renormalize to yes in a new run; no, the default, repeats earlier runs: values of visible "
            "tokens are made with a cell's whole library size, so they leak the sum of the hidden counts"
        )
        return [] if self.renormalize else [leak]

    def check_tokens(self, tokens: Tokens) -> None:
        if tokens.value_kind not in ("class", "scalar"):
            got = "places" if tokens.value_kind == "place" else "none"
            raise ValueError(
                f"objective masked_value needs values that measure expression, got {got}; use objective masked_gene"
            )


class MaskedGeneConfig(MaskedObjectiveConfig):
    """Predict which genes the masked tokens are; their values stay visible."""

    implementation = "cellmill.models.objectives.masked_gene:MaskedGene"
    name: Literal["masked_gene"] = "masked_gene"


class HiddenFracConfig(ObjectiveConfig):
    """Options of objectives that hide a random fraction of each cell."""

    needs_counts = True
    draws_view = True
    # `view` removes what is hidden; `prepare` leaves the shown tokens as they are
    owns_tokens = False

    min_hidden_frac: float = Field(0.2, ge=0, lt=1)
    """Minimum hidden fraction of a cell's genes or counts."""
    max_hidden_frac: float = Field(0.8, gt=0, lt=1)
    """Maximum hidden fraction; for each cell and step, the fraction is drawn uniformly between
    minimum and maximum.
    """

    def problems(self) -> Iterator[str]:
        if self.min_hidden_frac > self.max_hidden_frac:
            yield f"min_hidden_frac: expected at most {self.max_hidden_frac:g}, the maximum; lower it"


class QueryDecodingConfig(HiddenFracConfig):
    """Predict the value of each queried gene, zeros included, from the cell embedding and the gene."""

    implementation = "cellmill.models.objectives.query_decoding:QueryDecoding"
    name: Literal["query_decoding"] = "query_decoding"
    max_asked: int = Field(256, ge=1)
    """Maximum number of hidden detected genes per cell to predict in a step. It bounds the
    decoder's memory.
    """
    undetected_ratio: float = Field(1.0, gt=0)
    """Hidden undetected genes to predict per detected one."""
    decoder_hidden: int = Field(128, ge=1)
    """Width of the decoder."""
    decoder_layers: int = Field(2, ge=0)
    """Feed-forward layers of the decoder."""

    def check_tokens(self, tokens: Tokens) -> None:
        if tokens.value_kind != "scalar":
            raise ValueError(
                f"objective query_decoding needs numbers, got {tokens.tokenizer}; set tokens.tokenizer to continuous"
            )


class NextGeneConfig(ObjectiveConfig):
    """Predict each next gene of a cell in rank order, its value, and the end of the cell."""

    implementation = "cellmill.models.objectives.next_gene:NextGene"
    name: Literal["next_gene"] = "next_gene"
    value_loss_weight: float = Field(1.0, ge=0)
    """Weight of the value loss: cross-entropy of bins, squared error of continuous values. 0 turns
    it off.
    """

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse sequences: each gene is predicted among those that the cell does not have yet."""
        if tokens.sequences:
            raise ValueError(
                "objective next_gene needs tokens that differ within a cell, but residues of sequences repeat; "
                "use family encoder and objective masked_gene"
            )


class LabelConfig(ObjectiveConfig):
    """Options of objectives that read a label of each cell."""

    owns_tokens = False
    label_option = "label_column"

    label_column: str
    """obs column of the label, which model cards and tables name; cells without a label are
    ignored.
    """

    def columns(self, option: str = "objective") -> Columns:
        return Columns(levels={self.label_column: f"{option}.label_column"})


class HeadConfig(ObjectiveConfig):
    """Options of objectives that add a head to the cell embedding."""

    owns_tokens = False
    families = EMBEDDING_FAMILIES

    head_hidden: int | None = Field(None, ge=1)
    """Width of a hidden layer between embedding and prediction; null is a linear model."""
    head_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the last layer of the head."""


class ClassificationConfig(LabelConfig, HeadConfig):
    """Predict the label of a cell from its embedding; `cellmill predict` then labels other cells."""

    implementation = "cellmill.models.objectives.classification:Classification"
    name: Literal["classification"] = "classification"
    class_weights: (
        Literal["balanced"] | dict[str, Annotated[float, Field(allow_inf_nan=True)]] | None
    ) = None
    """Weight of a cell's loss by its label; 1 for labels that are not listed. balanced: N / (K n)
    for a label with n cells, if there are N labelled training cells and K labels. train writes the
    numbers into the run.
    """
    adversarial_scale: float | None = Field(None, gt=0)
    """For a part of a sum: the gradient to the cell embedding is reversed and multiplied by this
    number. So the head learns the label, for example a batch or donor, and the model hides it. 0.02
    is mild; at 0.2 embeddings collapsed. Such a label is not predicted, and val_loss leaves its
    loss out. null trains head and model together.
    """

    @property
    def weight_by_label(self) -> dict[str, float]:
        return self.class_weights if isinstance(self.class_weights, dict) else {}

    def problems(self) -> Iterator[str]:
        for label, weight in self.weight_by_label.items():
            if not 0 <= weight < math.inf:
                yield f"class_weights: {label}: expected a finite weight of 0 or more, got {weight}"

    @property
    def supervised_by(self) -> tuple[str, ...]:
        return () if self.adversarial_scale else super().supervised_by

    def columns(self, option: str = "objective") -> Columns:
        named = (f"{option}.class_weights", self.label_column, list(self.weight_by_label))
        return super().columns(option) | Columns(named=[named])

    def stream(self) -> dict[str, Any]:
        # weights in the loss, not draws, decide what a label counts
        balanced = {} if self.class_weights is None else {"weight_exponent": 0.0}
        return {"weight_by": self.label_column, "labelled_frac": 1.0} | balanced

    def fit(self, facts: Facts) -> Self:
        if self.class_weights != "balanced":
            return self
        counts = {label: n for label, n in facts.cells_by_level(self.label_column).items() if n}
        weights = {label: sum(counts.values()) / (len(counts) * n) for label, n in counts.items()}
        return self.model_copy(update={"class_weights": weights})


class SupervisedContrastiveConfig(LabelConfig):
    """Separate the embeddings of cells of one label from all others of the global batch (Khosla et
    al. 2020).
    """

    implementation = "cellmill.models.objectives.supervised_contrastive:SupervisedContrastive"
    name: Literal["supervised_contrastive"] = "supervised_contrastive"
    temperature: float = Field(0.1, gt=0)
    """Temperature, which divides cosine similarities; lower values give the nearest cells more
    weight.
    """


class RegressionConfig(HeadConfig):
    """Predict a number per cell from its embedding; `cellmill predict` then predicts it for other
    cells.
    """

    implementation = "cellmill.models.objectives.regression:Regression"
    label_option = "target_column"
    name: Literal["regression"] = "regression"
    target_column: str
    """obs column of the target; cells without a value are ignored. It is standardised: the model
    learns (target - target_mean) / target_std, and predictions are in the column's own unit.
    """
    loss: Literal["mse", "huber", "pearson"] = "mse"
    """mse: squared error; huber: linear above huber_delta (Huber 1964); pearson: 1 minus Pearson's
    correlation over the cells of a global batch, which leaves scale and offset of the predictions
    arbitrary.
    """
    huber_delta: float = Field(1.0, gt=0)
    """Threshold of the Huber loss, in standard deviations of the target; read with loss huber."""
    target_mean: float | None = None
    """Mean of the target; null computes it from the training cells, and train writes it into the
    run.
    """
    target_std: float | None = Field(None, gt=0)
    """Standard deviation of the target; null computes it likewise."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        """Read the former names of options, which earlier models and runs have stored."""
        if not isinstance(given, dict):
            return given
        names = {"number_hidden": "head_hidden", "number_dropout": "head_dropout"}
        for former, name in names.items():
            if given.get(former) is not None and given.get(name, given[former]) != given[former]:
                raise ValueError(f"{former} is the former name of {name}: set {name} alone")
        return {names.get(key, key): value for key, value in given.items()}

    def columns(self, option: str = "objective") -> Columns:
        return Columns(numbers={self.target_column: f"{option}.target_column"})

    def fit(self, facts: Facts) -> Self:
        moments = dict(zip(("target_mean", "target_std"), facts.moments(self.target_column)))
        return self.model_copy(
            update={key: value for key, value in moments.items() if getattr(self, key) is None}
        )


class DistillConfig(ObjectiveConfig):
    """Predict a teacher's embedding from the cell embedding, by a linear layer: usually in a sum
    with cell_decoding.
    """

    implementation = "cellmill.models.objectives.distill:Distill"
    owns_tokens = False
    families = EMBEDDING_FAMILIES
    name: Literal["distill"] = "distill"
    teacher: str
    """Teacher whose embeddings of the corpus's datasets are predicted: the name of a run, or the
    path of a folder, with a `/`, such as ./scgpt. The folder has one file DATASET.h5ad per dataset,
    with the vectors in obsm["X_cellmill"], obsm["X_emb"] or X and the cells' names in obs. Cells
    without a vector are ignored.
    """
    vectors: TeacherVectors | None = None
    """Width and digests of the teacher's vectors, which train writes into the run; leave it out."""

    @property
    def supervised_by(self) -> tuple[str, ...]:
        return () if self.vectors is None else tuple(self.vectors.supervised_by)

    @property
    def teachers(self) -> tuple[str, ...]:
        return (self.teacher,)

    def fit(self, facts: Facts) -> Self:
        return self.model_copy(update={"vectors": facts.teacher()})


@cache
def _part(name: str) -> type[Plugin]:
    """Options class of a part of a sum: the objective's options and `weight`."""
    if name == "sum":
        raise ValueError("sum: a sum cannot be part of a sum; list its parts in its place")
    objective = plugin.load("objective", name, ObjectiveConfig)
    if "weight" in objective.model_fields:
        raise ValueError(
            f"objective {name} has an option `weight` of its own and cannot be part of a sum"
        )
    weight: Any = (
        float,
        Field(1.0, gt=0, description="Weight of the objective's mean loss in the sum."),
    )
    return create_model(f"Weighted{objective.__name__}", __base__=objective, weight=weight)


class SumConfig(ObjectiveConfig):
    """Several objectives at once: the weighted sum of their mean losses, from one forward pass."""

    implementation = "cellmill.models.objectives.sum:Sum"
    name: Literal["sum"] = "sum"
    parts: Annotated[
        dict[str, SerializeAsAny[ObjectiveConfig]],
        BeforeValidator(partial(by_name, ObjectiveConfig, choice=_part)),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": ["object", "null"]}}),
    ]
    """Objectives, each with its options and `weight`, the factor of its mean loss (by default 1.0).
    A part may have any name if its key `name` is the objective, so that several parts can predict
    different columns. One part may define a view (cell_decoding, denoise, query_decoding,
    perturbation_response), which all parts then see, and one may hide tokens (masked_value,
    masked_gene) or, without a view, read the model's tokens as targets (next_gene).
    """

    def problems(self) -> Iterator[str]:
        if not self.parts:
            yield "parts: expected at least one objective with its options, such as cell_decoding: {}, got none"
        has_view = any(part.draws_view for part in self.parts.values())
        for name, part in self.parts.items():
            if name != part.name and not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name):
                yield (
                    "parts: expected a name that starts with a letter and has only letters, digits and _, got "
                    f"{name}; choose another"
                )
            if has_view and isinstance(part, NextGeneConfig):
                yield f"parts: {name} predicts where whole cells end, and another part draws a view; keep one"
        for attribute, reason in (
            ("draws_view", "draw a view, and the model is given one"),
            (
                "owns_tokens",
                "hide tokens or read them as targets, and the model is given one batch",
            ),
            ("teachers", "have a teacher, and a batch carries the vectors of one teacher"),
        ):
            having = [name for name, part in self.parts.items() if getattr(part, attribute)]
            if len(having) > 1:
                yield f"parts: {' and '.join(having)} {reason}; keep one"

    @property
    def needs_counts(self) -> bool:  # type: ignore[override]
        return any(part.needs_counts for part in self.all_parts())

    def named_parts(self, option: str = "objective") -> dict[str, ObjectiveConfig]:
        return {f"{option}.parts.{name}": part for name, part in self.parts.items()}

    def columns(self, option: str = "objective") -> Columns:
        parts = self.named_parts(option)
        return reduce(or_, (part.columns(where) for where, part in parts.items()))

    def stream(self) -> dict[str, Any]:
        return self.all_parts()[0].stream() if len(self.parts) == 1 else {}

    def choices(self) -> dict[str, str]:
        return reduce(or_, (part.choices() for part in self.all_parts()))

    def choose_columns(self, facts: Facts, labels: Sequence[str]) -> Self:
        parts = {name: part.choose_columns(facts, labels) for name, part in self.parts.items()}
        return self.model_copy(update={"parts": parts})

    def fit(self, facts: Facts) -> Self:
        return self.model_copy(
            update={"parts": {name: part.fit(facts) for name, part in self.parts.items()}}
        )

    @property
    def supervised_by(self) -> tuple[str, ...]:
        columns = chain.from_iterable(part.supervised_by for part in self.all_parts())
        return tuple(dict.fromkeys(columns))

    @property
    def teachers(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(part.teachers for part in self.all_parts()))

    def warnings(self, option: str = "objective") -> list[str]:
        parts = self.named_parts(option)
        return [line for where, part in parts.items() for line in part.warnings(where)]

    def check_tokens(self, tokens: Tokens) -> None:
        for part in self.all_parts():
            part.check_tokens(tokens)


class DecodingConfig(HiddenFracConfig):
    """Options of objectives that predict expression, over the whole vocabulary, from the cell
    embedding.
    """

    implementation = "cellmill.models.objectives.cell_decoding:CellDecoding"

    likelihood: Literal["softmax", "nb"] = "softmax"
    """softmax: cross-entropy between predicted and true profile. nb: negative binomial of the count
    of every gene, zeros included. Its mean is the softmax times the sum of the cell's counts to
    predict; its dispersion is learned per gene. Genes cut off by tokens.max_tokens count as zeros.
    """
    weights: Literal["log1p", "counts"] = "log1p"
    """Weight of a gene in its cell's cross-entropy, normalised per cell: log(1 + count), or the
    count.
    """
    decoder_hidden: int | None = Field(256, ge=1)
    """Width of the decoder's hidden layer; null is linear."""
    view_loss: Literal["vicreg"] | None = None
    """A second loss, only in training. It compares the embeddings of the shown and of the hidden
    part of each cell over the global batch, in two forward passes. vicreg:
    variance-invariance-covariance regularisation (Bardes et al. 2022).
    """
    # the paper's 25 : 25 : 1; with ten times as much, probes of the demo's cells lost 0.04 of
    # accuracy
    invariance_weight: float = Field(0.1, ge=0)
    """Weight of vicreg's invariance term, the mean squared difference; the cross-entropy of a cell
    has weight 1.
    """
    variance_weight: float = Field(0.1, ge=0)
    """Weight of vicreg's variance term, which is 0 if all standard deviations are at least 1."""
    covariance_weight: float = Field(0.004, ge=0)
    """Weight of vicreg's covariance term."""
    batch_column: str | None = Field(
        None,
        description="obs column of the batch, or `dataset`. The decoder gets a term per batch, so that embeddings need "
        f"not contain the batch; an unknown batch gets the mean term. {AUTO}: the first of batch, donor and dataset "
        f"with two values of at least {MIN_BATCH_CELLS} training cells each, which together hold half of the training "
        "cells, unless it determines a label, condition or perturbation; without one, null. `plan` and `train` print "
        "the column and the reason.",
    )
    batch_adversary: float | None = Field(
        None,
        gt=0,
        description="Weight of the loss of a classifier of batch_column whose reversed gradient removes the batch from "
        f"embeddings. null: none, but batch_column {AUTO} then sets {ADVERSARY:g} for column batch.",
    )
    batch_reason: str | None = None
    """Why batch_column auto took its column, which train writes into the run; leave it out."""
    batch_adversary_scale: float = Field(0.02, gt=0)
    """Factor of the reversed gradient, besides the loss's weight. If their product is large,
    embeddings collapse.
    """

    def problems(self) -> Iterator[str]:
        vicreg = ("invariance_weight", "variance_weight", "covariance_weight")
        unread = {}
        if self.likelihood == "nb":
            unread["weights"] = "likelihood softmax, got nb"
        if self.view_loss is None:
            unread |= dict.fromkeys(vicreg, "view_loss vicreg, got null")
        if self.batch_adversary is None and self.batch_column != AUTO:
            unread["batch_adversary_scale"] = "batch_adversary, got null"
        for name, required in unread.items():
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name} requires {required}; leave {name} out"
        if self.batch_adversary is not None and self.batch_column is None:
            yield "batch_adversary requires batch_column; set it, or batch_adversary to null"

    _dump = leaving_out("batch_reason")

    def choices(self) -> dict[str, str]:
        return {} if self.batch_reason is None else {"batch": self.batch_reason}

    @property
    def resolved_batch_column(self) -> str | None:
        """Column of the batch; None without one, or before auto is resolved."""
        return None if self.batch_column == AUTO else self.batch_column

    def columns(self, option: str = "objective") -> Columns:
        column = self.resolved_batch_column
        return Columns({} if column is None else {column: f"{option}.batch_column"})

    def choose_columns(self, facts: Facts, labels: Sequence[str]) -> Self:
        if self.batch_column != AUTO:
            return self
        choice = choose_batch(facts, labels)
        changes: dict[str, Any] = {"batch_column": choice.column, "batch_reason": choice.reason}
        adversary = self.batch_adversary or choice.adversary
        if choice.column is None:
            adversary = None
        changes["batch_adversary"] = adversary
        if adversary is None:  # nothing reads the scale, and stored options must be valid
            name = "batch_adversary_scale"
            changes[name] = type(self).model_fields[name].default
        return self.model_copy(update=changes)

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse sequences, which have no counts. Refuse values of kind place unless the view is
        drop: a thinned cell would keep the rank order of its whole counts, and so leak them.
        """
        if tokens.sequences:
            raise ValueError(
                f"objective {self.name} needs counts, which sequences do not have; use objective masked_gene"
            )
        if getattr(self, "view", "") != "drop" and tokens.value_kind == "place":
            drop = " or view drop" if "view" in type(self).model_fields else ""
            raise ValueError(
                f"objective {self.name} needs values made from counts; set tokens.tokenizer to binned{drop}"
            )


class CellDecodingConfig(DecodingConfig):
    """Predict the hidden part of a cell's expression, over the whole vocabulary, from the cell
    embedding.
    """

    name: Literal["cell_decoding"] = "cell_decoding"
    max_hidden_frac: float = Field(0.99, gt=0, lt=1)
    """Maximum hidden fraction; for each cell and step, the fraction is drawn uniformly between
    minimum and maximum. With 0.8, a model of all genes does not learn from cells of few genes
    (docs/quality.md).
    """
    view: Literal["drop_thin", "thin", "drop"] = "drop_thin"
    """Part of a cell that the model sees. drop: all genes except a random fraction. thin: a
    binomial draw of each count. drop_thin: binomial draws of the remaining genes, with a separate
    fraction for each. The rest is hidden.
    """
    target: Literal["hidden", "all"] = "hidden"
    """Predict the hidden part, or the whole cell."""


class DenoiseConfig(DecodingConfig):
    """Predict a whole cell from binomial draws of its counts: cell_decoding with view thin and
    target all, and by default at most 80 % hidden.
    """

    view: ClassVar[Literal["thin"]] = "thin"
    target: ClassVar[Literal["all"]] = "all"

    name: Literal["denoise"] = "denoise"


class PerturbationResponseConfig(DecodingConfig):
    """Predict the hidden part of a cell's expression from its embedding and its perturbation. The
    model can then predict the expression of a control under a perturbation, which task perturbation
    evaluates.
    """

    implementation = "cellmill.models.objectives.perturbation_response:PerturbationResponse"
    view: ClassVar[Literal["thin"]] = "thin"
    target: ClassVar[Literal["hidden"]] = "hidden"
    label_option = "perturbation_column"
    name: Literal["perturbation_response"] = "perturbation_response"
    likelihood: Literal["softmax"] = "softmax"
    """Cross-entropy between predicted and true profile."""
    weights: Literal["counts"] = "counts"
    """Weight of a gene in its cell's cross-entropy: its count, because expression changes are
    measured in counts.
    """
    perturbation_column: str = "perturbation"
    """obs column of the perturbation; cells without a value are not targets."""
    control: str
    """Value that marks unperturbed cells."""
    perturbed_genes: dict[str, list[int]] | None = None
    """Token ids of the genes of each perturbation. null takes the genes in its name, joined by +;
    train writes them into the run.
    """

    def problems(self) -> Iterator[str]:
        if self.batch_column == self.perturbation_column:
            yield f"batch_column and perturbation_column are both {self.batch_column}; name another batch"

    def columns(self, option: str = "objective") -> Columns:
        named = (f"{option}.control", self.perturbation_column, [self.control])
        return Columns(
            {self.perturbation_column: f"{option}.perturbation_column"}, named=[named]
        ) | super().columns(option)

    def fit(self, facts: Facts) -> Self:
        if self.perturbed_genes is not None:
            return self
        named = facts.genes(self.perturbation_column).items()
        genes = {level: list(ids) for level, ids in named if ids and level != self.control}
        return self.model_copy(update={"perturbed_genes": genes})
