"""Task `gene_embedding`: predict from gene vectors which genes belong to a set, or are transcription factors.

For each gene set a logistic regression over genes is fitted on training folds and ranks the genes of the others; its
AUROC is the mean over folds. The genes are those of all sets plus a draw of other genes that training cells express:
otherwise a set could be recognised just because the model never saw the other genes. Every kind of features gets the
same genes and folds: the model's vectors (input and decoder); the same of the untrained model; loadings of the
principal components of training cells; mean, spread and detection rate of a gene in training cells, which are quite
informative (ribosomal genes are high, transcription factors low); random vectors.

The task reads no cells of the dataset: its result depends on the model alone and is computed once for all datasets.
Intervals are over genes and repetitions (`evaluate.scores`); gene sets are taken as given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import GeneEmbeddingConfig
from cellmill.data.genes.names import rows_of_names
from cellmill.errors import DataError
from cellmill.evaluate.scores import ScoreColumn, against_best, differences, table_rows
from cellmill.evaluate.task import Context, EvaluatedModel, TaskResult
from cellmill.evaluate.tasks.genes import (
    all_gene_vectors,
    auroc_terms,
    expression_statistics,
    loadings,
    read_gene_sets,
    read_genes,
)

SETS, FACTORS = "gene sets", "transcription factors"
STATISTICS = "mean, spread and detection of genes"


class GeneEmbedding:
    def __init__(self, config: GeneEmbeddingConfig) -> None:
        self.config = config
        self._known: tuple[EvaluatedModel, TaskResult] | None = None

    def run(self, context: Context) -> TaskResult:
        """A column for gene sets, their mean, and one for transcription factors; skipped without gene vectors."""
        if self._known is None or self._known[0] is not context.model:  # once for all datasets
            self._known = context.model, self._judged(context)
        return self._known[1]

    def _judged(self, context: Context) -> TaskResult:
        config, model = self.config, context.model
        vectors = all_gene_vectors(model)
        if not vectors:
            return TaskResult(skipped=f"family {model.config['family']} has no vectors of genes")
        profiles = model.training_profiles()
        expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        features = vectors | loadings(model) | {STATISTICS: expression_statistics(profiles)}
        asked: dict[str, dict[str, np.ndarray]] = {}
        figures: dict[str, Any] = {"genes": int(expressed.sum())}
        if config.gene_sets is not None:
            asked[SETS], told = self._members(context, Path(config.gene_sets), expressed)
            figures |= told
        if config.transcription_factors is not None:
            path = Path(config.transcription_factors)
            asked[FACTORS], told = self._members(context, path, expressed, read_genes(path))
            figures |= {f"{FACTORS}: {key}": value for key, value in told.items()}
        columns, of_sets = [], {}
        with threadpool_limits(1):  # small problems: threads cost more than they save
            for heading, sets in asked.items():
                if not sets:
                    continue
                found = self._terms(context, features, sets, expressed)
                mean = {name: np.mean(terms, axis=0) for name, terms in found.items()}
                columns.append(ScoreColumn(f"AUROC, {heading}", f"AUROC of {heading}", mean))
                if heading != FACTORS:
                    of_sets = {name: np.nanmean(terms, axis=2) for name, terms in found.items()}
        if not columns:
            few = f"no set has {self._fewest(context)} genes that the model knows and its training cells express"
            return TaskResult(figures=figures, skipped=f"{few} (min_genes, evaluate.folds)")
        names = [*asked.get(SETS, {})]
        rows = [
            row | {f"AUROC of {name}_repetitions": of_sets[row["name"]][at].tolist() for at, name in enumerate(names)}
            for row in table_rows(columns)
        ]
        return TaskResult(rows, columns[0].heading, against_best(columns), figures, differences=differences(columns))

    def _fewest(self, context: Context) -> int:
        return max(self.config.min_genes, context.options.folds)

    def _members(
        self, context: Context, path: Path, expressed: np.ndarray, listed: list[str] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Vocabulary rows of each set that is large enough, ascending, and figures; prints the coverage.

        `listed` is the one set of a file that is no GMT. Raises DataError if no name of the file is a known gene.
        """
        sets = {path.stem: listed} if listed is not None else read_gene_sets(path)
        names = {name for genes in sets.values() for name in genes}
        rows = rows_of_names(names, context.model.vocabulary)
        n_known = sum(row >= 0 for row in rows.values())
        if not n_known:
            first = min(names)
            raise DataError(
                f"{path}: none of its {len(names):,} genes is one of the model's, such as {first!r}; name genes by "
                "Ensembl id or current symbol, of the model's organism"
            )
        usable = {
            name: np.unique([row for gene in genes if (row := rows[gene]) >= 0 and expressed[row]]).astype(np.int64)
            for name, genes in sets.items()
        }
        fewest, n_genes = self._fewest(context), int(expressed.sum())
        kept = {name: of for name, of in usable.items() if fewest <= len(of) <= n_genes - fewest}
        left_out = sorted(set(sets) - set(kept))
        print(
            f"{context.dataset}: gene_embedding: {path}: {n_known:,} of {len(names):,} genes are the model's; "
            f"{len(kept):,} of {len(sets):,} sets have {fewest} or more that training cells express",
            flush=True,
        )
        if left_out:
            print(f"{context.dataset}: gene_embedding: left out: {', '.join(left_out)}", flush=True)
        sizes = {name: len(of) for name, of in kept.items()}
        figures = {"named_genes": len(names), "known_genes": n_known, "sets": len(kept), "genes_of_sets": sizes}
        return kept, figures | {"left_out": ", ".join(left_out) or "none"}

    def _terms(
        self,
        context: Context,
        features: Mapping[str, np.ndarray],
        sets: Mapping[str, np.ndarray],
        expressed: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Terms of the AUROC by features, (sets, repetitions, genes); NaN for genes that a repetition lacks."""
        config, options, n_genes = self.config, context.options, len(expressed)
        listed = np.unique(np.concatenate([*sets.values()]))
        rest = np.setdiff1d(np.flatnonzero(expressed), listed)
        terms = {name: np.full((len(sets), config.seeds, n_genes), np.nan) for name in features}
        for repetition in range(config.seeds):
            generator = np.random.Generator(np.random.Philox(key=[options.seed + repetition, 7]))
            genes = np.sort(np.concatenate([listed, generator.permutation(rest)[: config.max_others]]))
            given = {name: values[genes] for name, values in features.items()}
            splitter = StratifiedKFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for number, rows in enumerate(sets.values()):
                member = np.isin(genes, rows)
                for train, test in splitter.split(genes, member):
                    for name, values in given.items():
                        scores = _fitted(values[train], member[train]).decision_function(values[test])
                        terms[name][number, repetition, genes[test]] = auroc_terms(member[test], scores)
        return terms


def _fitted(values: np.ndarray, member: np.ndarray) -> Any:
    classifier = LogisticRegression(solver="newton-cholesky", max_iter=1000, class_weight="balanced")
    return make_pipeline(StandardScaler(), classifier).fit(values, member)
