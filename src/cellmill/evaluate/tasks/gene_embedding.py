"""Task `gene_embedding`: how well a classifier of gene vectors recognises the genes of a set, and
transcription factors (docs/evaluation.md).

For each set, a classifier is fitted and tested on folds of genes. The genes are all genes of any set, and
a draw of other genes. Only genes that training cells express are used, because genes that the model never
saw would make any set easy to recognise.
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
from cellmill.evaluate.tasks.gene_task import GeneTask, compute_auroc_terms, read_lines
from cellmill.runs.results import Score, ScoredMethod, TaskResult

SETS = "gene sets"  # heading of the sets in option `gene_sets`
FACTORS = "transcription factors"  # heading of the genes in option `transcription_factors`
STATISTICS = ScoredMethod("mean, spread and detection of genes")

RowsBySet = Mapping[str, np.ndarray]
"""Genes of each set, as rows of the vocabulary, ascending; by the name of the set."""


class GeneEmbedding(GeneTask):
    config: GeneEmbeddingConfig

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """AUROC of gene sets, averaged over the sets, and of transcription factors.

        Raises Skipped if no set has enough usable genes. Raises DataError if a file has no gene of the
        model.
        """
        min_genes = max(self.config.min_genes, context.options.folds)
        is_expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        features = vectors | {STATISTICS: expression_statistics(profiles)}
        sets_by_heading, figures = self._read_sets(context, is_expressed, min_genes)

        columns = []
        auroc_by_set: ByMethod = {}  # (sets, repetitions)
        for heading, sets in sets_by_heading.items():
            if not sets:
                continue
            terms = self._compute_terms(context, features, sets, is_expressed)
            means = {method: np.mean(values, axis=0) for method, values in terms.items()}
            columns.append(ScoreColumn(f"AUROC, {heading}", f"AUROC of {heading}", means))
            if heading == SETS:
                auroc_by_set = {
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
            for number, name in enumerate(sets_by_heading.get(SETS, {})):
                repetitions = auroc_by_set[row.method][number].tolist()
                # without a mean, the score is kept in metrics.json, and the table has no column for it
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
        # the time of a fit is proportional to its number of genes
        return super().estimate_s(sizes) + 1e-4 * n_fits * min(config.max_others, sizes.n_genes)

    def _read_sets(
        self, context: Context, is_expressed: np.ndarray, min_genes: int
    ) -> tuple[dict[str, RowsBySet], dict[str, Any]]:
        """Sets of each file by heading, SETS or FACTORS, and figures for metrics.json."""
        config = self.config
        sets_by_heading: dict[str, RowsBySet] = {}
        figures: dict[str, Any] = {"genes": int(is_expressed.sum())}
        for heading, file in ((SETS, config.gene_sets), (FACTORS, config.transcription_factors)):
            if file is None:
                continue
            path = Path(file)
            names_by_set = read_gene_sets(path) if heading == SETS else read_factors(path)
            sets_by_heading[heading], set_figures = _select_sets(
                context, path, names_by_set, is_expressed, min_genes
            )
            prefix = "" if heading == SETS else f"{FACTORS}: "
            figures |= {f"{prefix}{key}": value for key, value in set_figures.items()}
        return sets_by_heading, figures

    def _compute_terms(
        self, context: Context, features: ByMethod, sets: RowsBySet, is_expressed: np.ndarray
    ) -> ByMethod:
        """Terms whose mean is the AUROC of a set, (sets, repetitions, genes) by method. NaN for genes
        that a repetition does not use.
        """
        config = self.config
        options = context.options
        listed = np.unique(np.concatenate([*sets.values()]))  # genes of all sets
        rest = np.setdiff1d(np.flatnonzero(is_expressed), listed)
        terms = {
            method: np.full((len(sets), config.seeds, len(is_expressed)), np.nan)
            for method in features
        }
        for repetition in range(config.seeds):
            seed = options.seed + repetition
            others = seeded(seed, draws.OTHER_GENES).permutation(rest)[: config.max_others]
            genes = np.sort(np.concatenate([listed, others]))
            splitter = StratifiedKFold(options.folds, shuffle=True, random_state=seed)
            for number, rows in enumerate(sets.values()):
                is_member = np.isin(genes, rows)
                for fitted, tested in splitter.split(genes, is_member):
                    for method, values in features.items():
                        fold_terms = _score_fold(values[genes], is_member, fitted, tested)
                        terms[method][number, repetition, genes[tested]] = fold_terms
        return terms


def _score_fold(
    vectors: np.ndarray, is_member: np.ndarray, fitted: np.ndarray, tested: np.ndarray
) -> np.ndarray:
    """Terms of the AUROC of the `tested` genes, by a classifier of membership that is fitted on the
    `fitted` genes. Both are indices of `vectors`, (genes, width).
    """
    linear = LogisticRegression(solver="newton-cholesky", max_iter=1000, class_weight="balanced")
    classifier = make_pipeline(StandardScaler(), linear)
    classifier.fit(vectors[fitted], is_member[fitted])
    scores = classifier.decision_function(vectors[tested])
    return compute_auroc_terms(is_member[tested], scores)


def read_gene_sets(path: Path) -> dict[str, list[str]]:
    """Names of the genes of each set in a GMT file, by the name of the set. A gene is listed once.

    Raises DataError for a line that is not a set, and for a second set of the same name.
    """
    names_by_set: dict[str, list[str]] = {}
    for number, fields in read_lines(path):
        genes = [gene for gene in fields[2:] if gene]
        if not fields[0] or not genes:
            raise DataError(
                f"{path}, line {number}: expected a name, a description and genes, separated by tabs (GMT), got "
                f"{len(fields)} columns"
            )
        if fields[0] in names_by_set:
            raise DataError(f"{path}, line {number}: a second set {fields[0]!r}; leave one out")
        names_by_set[fields[0]] = [*dict.fromkeys(genes)]
    return names_by_set


def read_factors(path: Path) -> dict[str, list[str]]:
    """Names of the genes in the first column of a file, as one set with the name of the file. A gene is
    listed once.
    """
    names = [fields[0] for _, fields in read_lines(path) if fields[0]]
    return {path.stem: [*dict.fromkeys(names)]}


def _select_sets(
    context: Context,
    path: Path,
    names_by_set: Mapping[str, list[str]],
    is_expressed: np.ndarray,
    min_genes: int,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Usable genes of each set that has enough of them, as rows of the vocabulary, and figures of the file
    for metrics.json. Prints how many genes and sets can be used.

    A gene is usable if the model knows it, and if it is expressed. `is_expressed` is (genes,) bool over the
    vocabulary. A set needs at least `min_genes` usable genes, and as many expressed genes outside the set.
    Raises DataError if the model knows no gene of the file.
    """
    names = {*chain.from_iterable(names_by_set.values())}
    row_by_name = rows_of_names(names, context.model.vocabulary)
    n_known = sum(row >= 0 for row in row_by_name.values())
    if not n_known:
        raise DataError(
            f"{path}: none of its {len(names):,} genes is one of the model's, such as {min(names)!r}; name genes by "
            "Ensembl id or current symbol, of the model's organism"
        )
    n_expressed = int(is_expressed.sum())
    kept = {}
    for set_name, genes in names_by_set.items():
        rows = np.unique([row_by_name[gene] for gene in genes]).astype(np.int64)
        known = rows[rows >= 0]
        usable = known[is_expressed[known]]
        if min_genes <= len(usable) <= n_expressed - min_genes:
            kept[set_name] = usable
    left_out = ", ".join(sorted(set(names_by_set) - set(kept)))
    print(
        f"{context.dataset}: gene_embedding: {path}: {n_known:,} of {len(names):,} genes are the model's; "
        f"{len(kept):,} of {len(names_by_set):,} sets are used: training cells express at least {min_genes} of their "
        f"genes, and at least {min_genes} other genes"
        + (f"\n{context.dataset}: gene_embedding: left out: {left_out}" if left_out else ""),
        flush=True,
    )
    sizes = {name: len(usable) for name, usable in kept.items()}
    figures = {
        "named_genes": len(names),
        "known_genes": n_known,
        "sets": len(kept),
        "genes_of_sets": sizes,
    }
    return kept, figures | {"left_out": left_out or "none"}
