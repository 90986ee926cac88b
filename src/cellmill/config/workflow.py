"""The whole configuration: defaults for each section, corpora, and runs that may override any of them.

`Workflow.section(stage, name)` is what a rule hands to its stage: only the options that stage reads, so that a
changed key reruns those stages and no others.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_origin

from pydantic import BaseModel, Field, model_validator

from cellmill.config.checks import check_together
from cellmill.config.corpus import NAME, Dataset, read_datasets
from cellmill.config.evaluate import ReconstructConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.options import (
    OPTIONS,
    ConsolidateOptions,
    EmbedOptions,
    EvaluateOptions,
    PlanOptions,
    PreprocessOptions,
    ShardOptions,
    VocabularyOptions,
)
from cellmill.config.plugin import validated
from cellmill.config.run import Report
from cellmill.config.section import EachOnce, Section, part_of
from cellmill.errors import ConfigError, did_you_mean


# with several bases, pydantic puts the fields of the last one first
class CorpusConfig(ShardOptions, VocabularyOptions, PreprocessOptions):
    """Datasets that are preprocessed, counted and sharded together."""

    table: str = Field("config/datasets.tsv", description="Table of datasets.")
    datasets: Annotated[list[str], EachOnce] | None = Field(
        None, description="Names of the rows to use; null uses all."
    )


class RunConfig(EvaluateOptions, EmbedOptions, ConsolidateOptions, PlanOptions):
    """One model, from plan to evaluation."""

    corpus: str = Field(description="Name of its corpus.")
    init_from: str | None = Field(None, description="Run whose exported model provides the initial weights.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_together(self)
        task = self.evaluate.tasks.get("reconstruct")
        if isinstance(task, ReconstructConfig):
            changed = self.objective.model_dump() | task.objective
            validated(ObjectiveConfig, changed, ["evaluate.tasks.reconstruct.objective"])
        return self


class Workflow(Section):
    """config/config.yaml with all defaults and overrides applied."""

    report: Report
    corpora: dict[str, CorpusConfig] = Field(min_length=1)
    runs: dict[str, RunConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_and_references(self) -> Self:
        for kind, names in (("corpora", self.corpora), ("runs", self.runs)):
            for name in names:
                if not re.fullmatch(NAME, name):
                    raise ValueError(f"{kind}: {name!r} names a folder; use letters, digits, '_', '.' and '-'")
        for name, run in self.runs.items():
            if run.corpus not in self.corpora:
                raise ValueError(f"runs.{name}.corpus: no corpus {run.corpus!r}; there are: {', '.join(self.corpora)}")
            self._check_obs_columns(name, run)
            chain = [name]
            while (parent := self.runs[chain[-1]].init_from) is not None:
                if parent not in self.runs:
                    known = ", ".join(self.runs)
                    raise ValueError(f"runs.{chain[-1]}.init_from: no run {parent!r}; there are: {known}")
                if parent in chain:
                    raise ValueError(f"runs.{name}.init_from: a circle: {' -> '.join([*chain, parent])}")
                chain.append(parent)
        return self

    def _check_obs_columns(self, name: str, run: RunConfig) -> None:
        kept = self.corpora[run.corpus].preprocess.keep_obs
        if kept is None:
            return
        for column, option in run.obs_columns().items():
            # shards have `dataset` too, and a column of that name as `dataset_original`
            if column not in (*kept, "dataset", "dataset_original"):
                known = ", ".join(["dataset", *kept])
                raise ValueError(f"runs.{name}.{option}: no obs column {column!r}; preprocess.keep_obs keeps: {known}")

    def datasets(self, corpus: str) -> dict[str, Dataset]:
        """Every dataset of the corpus's table, including those the corpus does not train on."""
        return read_datasets(Path(self.corpora[corpus].table))

    def check_datasets(self, source: str) -> None:
        """Read every table. Raises ConfigError naming a dataset of `source` that its table does not have."""
        chosen = [(f"corpora.{name}", name, corpus.datasets) for name, corpus in self.corpora.items()]
        chosen += [(f"runs.{name}.evaluate", run.corpus, run.evaluate.datasets) for name, run in self.runs.items()]
        for where, corpus, names in chosen:
            known = self.datasets(corpus)
            for name in names or ():
                if name not in known:
                    raise ConfigError(
                        f"{source}: {where}.datasets: no dataset {name!r} in {self.corpora[corpus].table}; "
                        f"{did_you_mean(name, known)}"
                    )

    def trained_on(self, corpus: str) -> list[str]:
        """Names of the corpus's datasets, in the table's order."""
        chosen = self.corpora[corpus].datasets
        return [name for name in self.datasets(corpus) if chosen is None or name in chosen]

    def evaluated_on(self, run: str) -> list[str]:
        """Names of the datasets the run is evaluated on: `evaluate.datasets`, or those of its corpus."""
        chosen = self.runs[run].evaluate.datasets
        return chosen if chosen is not None else self.trained_on(self.runs[run].corpus)

    def entries(self, stage: str) -> Mapping[str, Section]:
        """Corpora or runs, whichever `stage` is run for; empty for a stage over all of them."""
        first = next(iter(OPTIONS[stage].model_fields))
        owners = [kind for kind, owner in entries_of(type(self)).items() if first in owner.model_fields]
        return getattr(self, owners[0]) if owners else {}

    def section(self, stage: str, name: str | None = None) -> dict[str, Any]:
        """JSON-able {section: options} that `stage` reads, for the corpus or run called `name`."""
        owner = self.entries(stage).get(name or "", self)
        return {section: getattr(owner, section).model_dump(mode="json") for section in OPTIONS[stage].model_fields}


def sections_of(owner: type[BaseModel]) -> dict[str, type[Section]]:
    """Sections of a corpus, a run or the whole workflow by name."""
    annotations = {name: field.annotation for name, field in owner.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


def entries_of(workflow: type[BaseModel] = Workflow) -> dict[str, type[Section]]:
    """The classes of a corpus and of a run, by the key that holds them."""
    return {
        name: part_of(field.annotation)
        for name, field in workflow.model_fields.items()
        if get_origin(field.annotation) is dict
    }
