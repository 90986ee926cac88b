"""Sections of the configuration that each stage reads. A new section is a class and a line here."""

from typing import Self

from pydantic import Field, SerializeAsAny, model_validator

from cellmill.config.corpus import Preprocess, Shard, VocabularyConfig
from cellmill.config.evaluate import Evaluate
from cellmill.config.parallel import Parallel
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.methods import MethodConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.config.parts.trackers import Track
from cellmill.config.run import (
    Atlas,
    Consolidate,
    Embed,
    KnockOut,
    Map,
    Plan,
    Predict,
    Report,
    Stream,
    Train,
)
from cellmill.config.section import Section


class PreprocessOptions(Section):
    preprocess: Preprocess


class VocabularyOptions(Section):
    vocabulary: VocabularyConfig


class ShardOptions(Section):
    shard: Shard


class TrainOptions(Section):
    tokens: SerializeAsAny[Tokens]
    stream: Stream
    model: SerializeAsAny[FamilyConfig]
    objective: SerializeAsAny[ObjectiveConfig] = Field(
        default_factory=lambda: ObjectiveConfig.model_validate({})
    )
    finetune: SerializeAsAny[MethodConfig] = Field(
        default_factory=lambda: MethodConfig.model_validate({})
    )
    parallel: Parallel
    train: Train
    track: Track = Track()

    @model_validator(mode="after")
    def _stream_of_objective(self) -> Self:
        defaults = self.objective.stream()
        if "weight_by" in self.stream.model_fields_set or not defaults:
            return self
        stream = Stream.model_validate(defaults | self.stream.model_dump(exclude_unset=True))
        return self.model_copy(update={"stream": stream})

    def obs_columns(self) -> dict[str, str]:
        """Option by obs column whose levels batches carry, in the order of the batches."""
        covariates = dict.fromkeys(self.tokens.covariates, "tokens.covariates")
        return dict(sorted((covariates | self.objective.columns().levels).items()))

    def number_columns(self) -> dict[str, str]:
        """Option by obs column whose numbers batches carry, in the order of the batches."""
        return dict(sorted(self.objective.columns().numbers.items()))

    @property
    def teacher(self) -> str | None:
        """Run, or folder of embeddings, whose vectors batches carry."""
        return next(iter(self.objective.teachers), None)

    def read_columns(self) -> dict[str, str]:
        """obs columns that the run depends on: the batch columns and `stream.weight_by`'s."""
        return dict(sorted((self.stream.weights_column() | self.obs_columns()).items()))


class PlanOptions(TrainOptions):
    plan: Plan


class ConsolidateOptions(Section):
    consolidate: Consolidate


class EmbedOptions(Section):
    embed: Embed


class PredictOptions(EmbedOptions):
    predict: Predict = Field(default_factory=lambda: Predict.model_validate({}))


class AtlasOptions(Section):
    atlas: Atlas = Field(default_factory=lambda: Atlas.model_validate({}))


class MapOptions(EmbedOptions):
    map: Map = Field(default_factory=lambda: Map.model_validate({}))


class KnockOutOptions(EmbedOptions):
    knock_out: KnockOut = Field(default_factory=lambda: KnockOut.model_validate({}))


class EvaluateOptions(Section):
    evaluate: Evaluate


class ReportOptions(Section):
    report: Report


OPTIONS: dict[str, type[Section]] = {
    "preprocess": PreprocessOptions,
    "vocabulary": VocabularyOptions,
    "divide": ShardOptions,
    "shard_part": ShardOptions,
    "shard": ShardOptions,
    "plan": PlanOptions,
    "train": TrainOptions,
    "consolidate": ConsolidateOptions,
    "embed": EmbedOptions,
    "predict": PredictOptions,
    "impute": EmbedOptions,
    "perturb": EmbedOptions,
    "atlas": AtlasOptions,
    "map": MapOptions,
    "knock_out": KnockOutOptions,
    "evaluate": EvaluateOptions,
    "predict_changes": EvaluateOptions,
    "report": ReportOptions,
}
