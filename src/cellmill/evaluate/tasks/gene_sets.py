"""Task `gene_embedding`: predict from gene vectors which genes belong to a set, or are transcription factors.

For each gene set a logistic regression over genes is fitted on training folds and ranks the genes of the others; its
AUROC is the mean over folds. The genes are those of all sets plus a draw of other genes that training cells express:
otherwise a set could be recognised just because the model never saw the other genes. All kinds of features get the same
genes and folds; the baseline of mean, spread and detection rate in training cells is quite informative. Intervals are
over genes and repetitions (`evaluate.scores`); gene sets are taken as given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import GeneEmbeddingConfig
from cellmill.data.genes.names import rows_of_names
from cellmill.errors import DataError
from cellmill.evaluate.scores import ScoreColumn, table_rows
from cellmill.evaluate.task import Context, TaskResult
from cellmill.evaluate.tasks.genes import GeneTask, auroc_terms, expression_statistics, read_gene_sets, read_genes

SETS, FACTORS = "gene sets", "transcription factors"
STATISTICS = "mean, spread and detection of genes"


class GeneEmbedding(GeneTask):
    config: GeneEmbeddingConfig

    def judge(self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix) -> TaskResult:
        """A column for gene sets, their mean, and one for transcription factors."""
        config, fewest = self.config, max(self.config.min_genes, context.options.folds)
        expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        features = vectors | {STATISTICS: expression_statistics(profiles)}
        members: dict[str, dict[str, np.ndarray]] = {}
        numbers: dict[str, Any] = {"genes": int(expressed.sum())}
        if config.gene_sets is not None:
            path = Path(config.gene_sets)
            members[SETS], found = _members(context, path, read_gene_sets(path), expressed, fewest)
            numbers |= found
        if config.transcription_factors is not None:
            path = Path(config.transcription_factors)
            members[FACTORS], found = _members(context, path, {path.stem: read_genes(path)}, expressed, fewest)
            numbers |= {f"{FACTORS}: {key}": value for key, value in found.items()}
        columns, by_set = [], {}
        with threadpool_limits(1):  # small problems: threads cost more than they save
            for heading, sets in members.items():
                if sets:
                    terms = self._terms(context, features, sets, expressed)
                    means = {name: np.mean(values, axis=0) for name, values in terms.items()}
                    columns.append(ScoreColumn(f"AUROC, {heading}", f"AUROC of {heading}", means))
                    if heading == SETS:
                        by_set = {name: np.nanmean(values, axis=2) for name, values in terms.items()}
        if not columns:
            few = f"no set has {fewest} genes that the model knows and its training cells express"
            return TaskResult(figures=numbers, skipped=f"{few} (min_genes, evaluate.folds)")
        rows = table_rows(columns)
        for row in rows:
            for at, name in enumerate(members.get(SETS, {})):
                row[f"AUROC of {name}_repetitions"] = by_set[row["name"]][at].tolist()
        return TaskResult.from_columns(columns, numbers, rows=rows)

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
            splitter = StratifiedKFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for number, rows in enumerate(sets.values()):
                member = np.isin(genes, rows)
                for train, test in splitter.split(genes, member):
                    for name, values in features.items():
                        linear = LogisticRegression(solver="newton-cholesky", max_iter=1000, class_weight="balanced")
                        fitted = make_pipeline(StandardScaler(), linear).fit(values[genes[train]], member[train])
                        scores = fitted.decision_function(values[genes[test]])
                        terms[name][number, repetition, genes[test]] = auroc_terms(member[test], scores)
        return terms


def _members(
    context: Context, path: Path, sets: Mapping[str, list[str]], expressed: np.ndarray, fewest: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Vocabulary rows of each set of at least `fewest` genes, ascending, and their numbers; prints the coverage."""
    rows = rows_of_names({name for genes in sets.values() for name in genes}, context.model.vocabulary)
    n_known = sum(row >= 0 for row in rows.values())
    if not n_known:
        raise DataError(
            f"{path}: none of its {len(rows):,} genes is one of the model's, such as {min(rows)!r}; name genes by "
            "Ensembl id or current symbol, of the model's organism"
        )
    n_genes, kept = int(expressed.sum()), {}
    for name, genes in sets.items():
        usable = np.unique([row for gene in genes if (row := rows[gene]) >= 0 and expressed[row]]).astype(np.int64)
        if fewest <= len(usable) <= n_genes - fewest:
            kept[name] = usable
    left_out = ", ".join(sorted(set(sets) - set(kept)))
    print(
        f"{context.dataset}: gene_embedding: {path}: {n_known:,} of {len(rows):,} genes are the model's; "
        f"{len(kept):,} of {len(sets):,} sets have {fewest} or more that training cells express",
        flush=True,
    )
    if left_out:
        print(f"{context.dataset}: gene_embedding: left out: {left_out}", flush=True)
    sizes = {name: len(usable) for name, usable in kept.items()}
    numbers = {"named_genes": len(rows), "known_genes": n_known, "sets": len(kept), "genes_of_sets": sizes}
    return kept, numbers | {"left_out": left_out or "none"}
