"""The whole configuration: defaults for each section, corpora, and runs that may override any of them.

`Workflow.section(stage, name)` is what a rule hands to its stage: only the options that stage reads, so that a
changed key reruns those stages and no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from cellmill.config.dataset import Dataset, is_name, read_datasets
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
from cellmill.config.run import Report, check_together
from cellmill.config.section import Section
from cellmill.errors import did_you_mean


# of several bases pydantic puts the fields of the last first
class CorpusConfig(ShardOptions, VocabularyOptions, PreprocessOptions):
    """Datasets that are preprocessed, counted and sharded together."""

    table: str = Field("config/datasets.tsv", description="Table of datasets.")
    datasets: list[str] | None = Field(None, description="Names of its rows to use; null uses all.")


class RunConfig(EvaluateOptions, EmbedOptions, ConsolidateOptions, PlanOptions):
    """One model, from plan to evaluation."""

    corpus: str = Field(description="Name of its corpus.")
    init_from: str | None = Field(None, description="Run whose exported model gives the first weights.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_together(self.tokens, self.stream, self.model, self.objective, self.parallel, self.train)
        return self


def sections_of(owner: type[BaseModel]) -> dict[str, type[Section]]:
    """Sections that a corpus, a run or the whole workflow has, by name."""
    return {
        name: field.annotation
        for name, field in owner.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


CORPUS_SECTIONS, RUN_SECTIONS = tuple(sections_of(CorpusConfig)), tuple(sections_of(RunConfig))


class Workflow(Section):
    """config/config.yaml, with every default filled in and every override applied."""

    report: Report
    corpora: dict[str, CorpusConfig] = Field(min_length=1)
    runs: dict[str, RunConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_and_references(self) -> Self:
        for kind, names in (("corpora", self.corpora), ("runs", self.runs)):
            for name in names:
                if not is_name(name):
                    raise ValueError(f"{kind}: {name!r} must be letters, digits, '_', '.' and '-'; it names a folder")
        for name, run in self.runs.items():
            if run.corpus not in self.corpora:
                raise ValueError(
                    f"runs.{name}.corpus: no corpus {run.corpus!r}; {did_you_mean(run.corpus, self.corpora)}"
                )
            seen = [name]
            while (parent := self.runs[seen[-1]].init_from) is not None:
                if parent not in self.runs:
                    raise ValueError(f"runs.{seen[-1]}.init_from: no run {parent!r}; {did_you_mean(parent, self.runs)}")
                if parent in seen:
                    raise ValueError(f"runs.{name}.init_from: a circle: {' -> '.join([*seen, parent])}")
                seen.append(parent)
        return self

    def datasets(self, corpus: str) -> dict[str, Dataset]:
        """Every dataset of the corpus's table, also those the corpus does not train on."""
        return read_datasets(Path(self.corpora[corpus].table))

    def trained_on(self, corpus: str) -> list[str]:
        """Names of the datasets the corpus is made of, in the table's order."""
        known, wanted = self.datasets(corpus), self.corpora[corpus].datasets
        for name in wanted or ():
            _require(name, known, f"corpora.{corpus}.datasets", self.corpora[corpus].table)
        return [name for name in known if wanted is None or name in wanted]

    def evaluated_on(self, run: str) -> list[str]:
        """Names of the datasets the run is evaluated on: those asked for, else its corpus's."""
        corpus = self.runs[run].corpus
        known, wanted = self.datasets(corpus), self.runs[run].evaluate.datasets
        for name in wanted or ():
            _require(name, known, f"runs.{run}.evaluate.datasets", self.corpora[corpus].table)
        return wanted if wanted is not None else self.trained_on(corpus)

    def section(self, stage: str, name: str | None = None) -> dict[str, Any]:
        """The options `stage` reads, as JSON-able {section: options}, for the corpus or run called `name`."""
        if stage == "report":
            owner: Section = self
        elif stage in CORPUS_SECTIONS:
            owner = self.corpora[name or ""]
        else:
            owner = self.runs[name or ""]
        return {section: getattr(owner, section).model_dump(mode="json") for section in OPTIONS[stage].model_fields}


def _require(name: str, known: dict[str, Dataset], where: str, table: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: no dataset {name!r} in {table}; {did_you_mean(name, known)}")
