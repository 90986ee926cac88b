"""Task `gene_embedding`: genes of sets, and transcription factors, recognised by their vectors
(docs/evaluation.md).

Folds divide the genes of all sets, and a draw of other genes that training cells express. Genes that
the model never saw are left out: they would make any set easy to recognise.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import GeneEmbeddingConfig
from cellmill.data.genes.names import rows_of_names
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.gene_vectors import expression_statistics
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.gene_task import GeneTask, auroc_terms, read_lines
from cellmill.runs.results import Score, ScoredMethod, TaskResult

SETS = "gene sets"
FACTORS = "transcription factors"
STATISTICS = ScoredMethod("mean, spread and detection of genes")


class GeneEmbedding(GeneTask):
    config: GeneEmbeddingConfig

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """A column for gene sets, their mean, and one for transcription factors."""
        config = self.config
        min_genes = max(config.min_genes, context.options.folds)
        expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        features = vectors | {STATISTICS: expression_statistics(profiles)}
        members: dict[str, dict[str, np.ndarray]] = {}
        figures: dict[str, Any] = {"genes": int(expressed.sum())}
        for heading, file in ((SETS, config.gene_sets), (FACTORS, config.transcription_factors)):
            if file is None:
                continue
            path = Path(file)
            genes_of_sets = read_gene_sets(path) if heading == SETS else read_factors(path)
            members[heading], set_figures = _find_members(
                context, path, genes_of_sets, expressed, min_genes
            )
            prefix = "" if heading == SETS else f"{FACTORS}: "
            figures |= {f"{prefix}{key}": value for key, value in set_figures.items()}
        columns = []
        by_set: ByMethod = {}  # (sets, repetitions)
        for heading, sets in members.items():
            if sets:
                terms = self._compute_terms(context, features, sets, expressed)
                means = {method: np.mean(values, axis=0) for method, values in terms.items()}
                columns.append(ScoreColumn(f"AUROC, {heading}", f"AUROC of {heading}", means))
                if heading == SETS:
                    by_set = {
                        method: np.nanmean(values, axis=2) for method, values in terms.items()
                    }
        if not columns:
            raise Skipped(
                f"no set has at least {min_genes} usable genes, with at least {min_genes} other genes outside it "
                "(usable: the model knows it and its training cells express it; min_genes, evaluate.folds)",
                figures,
            )
        rows = table_rows(columns)
        for row in rows:
            for number, name in enumerate(members.get(SETS, {})):
                repetitions = by_set[row.method][number].tolist()
                # a mean of None: kept in metrics.json, not a column
                row.scores[f"AUROC of {name}"] = Score(None, None, repetitions)
        return tabulate(columns, figures, rows=rows)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        config = self.config
        n_sets = 0
        if config.gene_sets is not None:
            n_sets += len(read_gene_sets(Path(config.gene_sets)))
        if config.transcription_factors is not None:
            n_sets += 1
        n_fits = n_sets * config.seeds * sizes.folds
        # a fit of all features takes as long as it has genes
        return super().estimate_s(sizes) + 1e-4 * n_fits * min(config.max_others, sizes.n_genes)

    def _compute_terms(
        self,
        context: Context,
        features: ByMethod,
        sets: Mapping[str, np.ndarray],
        expressed: np.ndarray,
    ) -> ByMethod:
        """Terms of the AUROC by features, (sets, repetitions, genes); NaN for genes that a
        repetition lacks.
        """
        config = self.config
        options = context.options
        listed = np.unique(np.concatenate([*sets.values()]))
        rest = np.setdiff1d(np.flatnonzero(expressed), listed)
        terms = {
            method: np.full((len(sets), config.seeds, len(expressed)), np.nan)
            for method in features
        }
        for repetition in range(config.seeds):
            others = seeded(options.seed + repetition, draws.OTHER_GENES).permutation(rest)[
                : config.max_others
            ]
            genes = np.sort(np.concatenate([listed, others]))
            splitter = StratifiedKFold(
                options.folds, shuffle=True, random_state=options.seed + repetition
            )
            for number, rows in enumerate(sets.values()):
                member = np.isin(genes, rows)
                for train, test in splitter.split(genes, member):
                    for method, values in features.items():
                        linear = LogisticRegression(
                            solver="newton-cholesky", max_iter=1000, class_weight="balanced"
                        )
                        classifier = make_pipeline(StandardScaler(), linear)
                        classifier.fit(values[genes[train]], member[train])
                        scores = classifier.decision_function(values[genes[test]])
                        fold_terms = auroc_terms(member[test], scores)
                        terms[method][number, repetition, genes[test]] = fold_terms
        return terms


def read_gene_sets(path: Path) -> dict[str, list[str]]:
    """Genes of each set of a GMT file, each once. Raises DataError naming the malformed line."""
    sets: dict[str, list[str]] = {}
    for number, fields in read_lines(path):
        genes = [gene for gene in fields[2:] if gene]
        if not fields[0] or not genes:
            raise DataError(
                f"{path}, line {number}: expected a name, a description and genes, separated by tabs (GMT), got "
                f"{len(fields)} columns"
            )
        if fields[0] in sets:
            raise DataError(f"{path}, line {number}: a second set {fields[0]!r}; leave one out")
        sets[fields[0]] = [*dict.fromkeys(genes)]
    return sets


def read_factors(path: Path) -> dict[str, list[str]]:
    """One set, named like the file, of the genes in its first column, each once."""
    names = [fields[0] for _, fields in read_lines(path) if fields[0]]
    return {path.stem: [*dict.fromkeys(names)]}


def _find_members(
    context: Context,
    path: Path,
    sets: Mapping[str, list[str]],
    expressed: np.ndarray,
    min_genes: int,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Vocabulary rows of each set of at least `min_genes` genes, ascending, and figures for the result.

    Prints the coverage.
    """
    rows = rows_of_names({*chain.from_iterable(sets.values())}, context.model.vocabulary)
    n_known = sum(row >= 0 for row in rows.values())
    if not n_known:
        raise DataError(
            f"{path}: none of its {len(rows):,} genes is one of the model's, such as {min(rows)!r}; name genes by "
            "Ensembl id or current symbol, of the model's organism"
        )
    n_genes = int(expressed.sum())
    kept = {}
    for name, genes in sets.items():
        rows_of_set = np.unique([rows[gene] for gene in genes]).astype(np.int64)
        known = rows_of_set[rows_of_set >= 0]
        usable = known[expressed[known]]
        if min_genes <= len(usable) <= n_genes - min_genes:
            kept[name] = usable
    left_out = ", ".join(sorted(set(sets) - set(kept)))
    print(
        f"{context.dataset}: gene_embedding: {path}: {n_known:,} of {len(rows):,} genes are the model's; "
        f"{len(kept):,} of {len(sets):,} sets have {min_genes} or more that training cells express, and lack as many"
        + (f"\n{context.dataset}: gene_embedding: left out: {left_out}" if left_out else ""),
        flush=True,
    )
    sizes = {name: len(usable) for name, usable in kept.items()}
    figures = {
        "named_genes": len(rows),
        "known_genes": n_known,
        "sets": len(kept),
        "genes_of_sets": sizes,
    }
    return kept, figures | {"left_out": left_out or "none"}
