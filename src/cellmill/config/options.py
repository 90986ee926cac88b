"""What each stage takes: its sections of the configuration, typed."""

from __future__ import annotations

from cellmill.config.corpus import Preprocess, Shard, Vocabulary
from cellmill.config.run import Consolidate, Embed, Evaluate, Model, Parallel, Plan, Report, Stream, Tokens, Train
from cellmill.config.section import Section


class PreprocessOptions(Section):
    preprocess: Preprocess


class VocabularyOptions(Section):
    vocabulary: Vocabulary


class ShardOptions(Section):
    shard: Shard


class TrainOptions(Section):
    tokens: Tokens
    stream: Stream
    model: Model
    parallel: Parallel
    train: Train


class PlanOptions(TrainOptions):
    plan: Plan


class ConsolidateOptions(Section):
    consolidate: Consolidate


class EmbedOptions(Section):
    embed: Embed


class EvaluateOptions(Section):
    evaluate: Evaluate


class ReportOptions(Section):
    report: Report


OPTIONS: dict[str, type[Section]] = {
    "preprocess": PreprocessOptions,
    "vocabulary": VocabularyOptions,
    "shard": ShardOptions,
    "plan": PlanOptions,
    "train": TrainOptions,
    "consolidate": ConsolidateOptions,
    "embed": EmbedOptions,
    "evaluate": EvaluateOptions,
    "report": ReportOptions,
}
