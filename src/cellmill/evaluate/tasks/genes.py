"""Tasks on the vectors of genes, `gene_embedding` and `grn` (docs/evaluation.md), and what they
read and score.

`gene_embedding`: the genes of the folds are those of all sets plus a draw of others that training
cells express: otherwise a set could be recognised just because the model never saw the other genes.
`grn`: vectors are centred over all genes, because what all vectors share says nothing about a pair;
a factor is one draw in the interval.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import GeneEmbeddingConfig, GrnConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.genes.names import rows_of_names
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.scores import EMBEDDING, UNTRAINED, ScoreColumn, seeded, table_rows
from cellmill.evaluate.task import (
    COMPONENTS,
    Context,
    EvaluatedModel,
    PrincipalComponents,
    Skipped,
    Task,
    TaskResult,
)
from cellmill.files import require_file
from cellmill.models.family import Model

OF_GENES = f"{EMBEDDING} of genes"
LOADINGS = f"PCA{COMPONENTS} of genes"
RANDOM = "random vectors"
SETS = "gene sets"
FACTORS = "transcription factors"
DRAWS = 20  # random rankings


class GeneTask(Task):
    """Task on the vectors of genes: it reads no cells of a dataset, so its result is computed once
    for all of them.
    """

    keeps_result = True
    _known: TaskResult | None = None

    def run(self, context: Context) -> TaskResult:
        """Scores of each kind of gene features; skipped for a model without gene vectors."""
        model = context.model
        if self._known is None:
            vectors = gene_vectors(model)
            if not vectors:
                raise Skipped(f"family {model.config['family']} has no vectors of genes")
            vectors[LOADINGS] = loadings_of(model.components)
            self._known = self.judge(context, vectors, model.training_profiles())
        return self._known

    def judge(
        self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix
    ) -> TaskResult:
        """Scores of `vectors` (genes, width) by name; `profiles` (cells, genes) are log-normalised
        training cells.
        """
        raise NotImplementedError


def gene_vectors(model: EvaluatedModel) -> dict[str, np.ndarray]:
    """Vectors of the vocabulary's genes by name, (genes, width): in the model's input and decoder,
    in the same of the untrained model, and random ones of the first's width. Empty for a model
    without any.
    """
    own = _tables(model.network)
    if not own:
        return {}
    untrained = {f"{UNTRAINED} {name}": values for name, values in _tables(model.untrained).items()}
    shape = next(iter(own.values())).shape
    return own | untrained | {RANDOM: seeded(model.seed, 6).normal(size=shape)}


@torch.no_grad()
def _tables(network: Model) -> dict[str, np.ndarray]:
    tables = {}
    parameters = dict(network.named_parameters())
    table = getattr(getattr(network, "gene_embedding", None), "weight", None)
    if table is not None:
        given = getattr(network, "gene_vectors", None)
        tables[OF_GENES] = table if given is None else table + given.project(given.table.weight)
    for name in sorted(network.objective.gene_rows):
        # not a bias
        if name in parameters and parameters[name].ndim == 2 and parameters[name].shape[1] > 1:
            tables[f"{OF_GENES}, {name.removesuffix('.weight')}"] = parameters[name]
    return {name: table[len(SPECIAL) :].float().cpu().numpy() for name, table in tables.items()}


def loadings_of(components: PrincipalComponents) -> np.ndarray:
    """(genes, components) float64: each component in units of its standard deviation over cells."""
    return np.asarray(components.components_.T * np.sqrt(components.explained_variance_))


def expression_statistics(profiles: sp.csr_matrix) -> np.ndarray:
    """(genes, 3) float64: mean, standard deviation and share of cells with the gene, of profiles
    (cells, genes).
    """
    n = profiles.shape[0]
    dense = profiles.astype(np.float64)
    mean = np.asarray(dense.mean(axis=0)).ravel()
    square = np.asarray(dense.multiply(dense).mean(axis=0)).ravel()
    detected = np.bincount(profiles.indices[profiles.data > 0], minlength=profiles.shape[1]) / n
    return np.stack([mean, np.sqrt(np.maximum(square - mean**2, 0)), detected], axis=1)


def read_gene_sets(path: Path) -> dict[str, list[str]]:
    """Genes of each set of a GMT file, each once. Raises DataError naming the malformed line."""
    sets: dict[str, list[str]] = {}
    for number, fields in _lines(path):
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


def read_edges(path: Path) -> list[tuple[str, str]]:
    """Transcription factors and targets as written, each pair once. Raises DataError naming the
    malformed line.
    """
    edges: dict[tuple[str, str], None] = {}
    for number, fields in _lines(path):
        if len(fields) < 2 or not fields[0] or not fields[1]:
            raise DataError(
                f"{path}, line {number}: expected a transcription factor and a target, separated by a tab, got "
                f"{len(fields)} columns"
            )
        edges[fields[0], fields[1]] = None
    return [*edges]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line that is neither empty nor a comment (#). Raises DataError if
    there is none.
    """
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    lines = [
        (number, [field.strip() for field in line.split("\t")])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        raise DataError(f"{path}: empty")
    return lines


def auroc(member: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs of a member and another in which the member has the higher score; ties count
    half.
    """
    return float(placements(member, scores)[member].mean())


def placements(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: of a member the share of others with a lower score, of another that of members
    with a higher one.

    Means over the members and over the others are both the AUROC (DeLong et al. 1988, Biometrics
    44:837).
    """
    n_members = int(member.sum())
    n_others = len(member) - n_members
    ranks = rankdata(scores)
    found = np.empty(len(member))
    found[member] = (ranks[member] - rankdata(scores[member])) / n_others
    found[~member] = 1 - (ranks[~member] - rankdata(scores[~member])) / n_members
    return found


def auroc_terms(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: terms whose mean is the AUROC, and the variance of whose mean is DeLong's."""
    found = placements(member, scores)
    area = found[member].mean()
    weight = np.where(member, len(member) / member.sum(), len(member) / (~member).sum())
    terms: np.ndarray = area + weight * (found - area)
    return terms


def average_precision(member: np.ndarray, scores: np.ndarray) -> float:
    """Area under the steps of precision over recall; ties are one step."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(member[order])
    ranked = scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    precision = hits[ends] / (ends + 1)
    recall = hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0) * precision).sum())


class GeneEmbedding(GeneTask):
    config: GeneEmbeddingConfig

    def judge(
        self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix
    ) -> TaskResult:
        """A column for gene sets, their mean, and one for transcription factors."""
        config, fewest = self.config, max(self.config.min_genes, context.options.folds)
        expressed = np.asarray(profiles.sum(axis=0)).ravel() > 0
        features = vectors | {
            "mean, spread and detection of genes": expression_statistics(profiles)
        }
        members: dict[str, dict[str, np.ndarray]] = {}
        numbers: dict[str, Any] = {"genes": int(expressed.sum())}
        if config.gene_sets is not None:
            path = Path(config.gene_sets)
            members[SETS], found = _members(context, path, read_gene_sets(path), expressed, fewest)
            numbers |= found
        if config.transcription_factors is not None:
            path = Path(config.transcription_factors)
            genes = [*dict.fromkeys(fields[0] for _, fields in _lines(path) if fields[0])]
            members[FACTORS], found = _members(context, path, {path.stem: genes}, expressed, fewest)
            numbers |= {f"{FACTORS}: {key}": value for key, value in found.items()}
        columns = []
        by_set = {}
        for heading, sets in members.items():
            if sets:
                terms = self._terms(context, features, sets, expressed)
                means = {name: np.mean(values, axis=0) for name, values in terms.items()}
                columns.append(ScoreColumn(f"AUROC, {heading}", f"AUROC of {heading}", means))
                if heading == SETS:
                    by_set = {name: np.nanmean(values, axis=2) for name, values in terms.items()}
        if not columns:
            few = f"no set has {fewest} genes that the model knows and its training cells express, and lacks as many"
            raise Skipped(f"{few} (min_genes, evaluate.folds)", numbers)
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
        """Terms of the AUROC by features, (sets, repetitions, genes); NaN for genes that a
        repetition lacks.
        """
        config = self.config
        options = context.options
        listed = np.unique(np.concatenate([*sets.values()]))
        rest = np.setdiff1d(np.flatnonzero(expressed), listed)
        terms = {
            name: np.full((len(sets), config.seeds, len(expressed)), np.nan) for name in features
        }
        for repetition in range(config.seeds):
            others = seeded(options.seed + repetition, 7).permutation(rest)[: config.max_others]
            genes = np.sort(np.concatenate([listed, others]))
            splitter = StratifiedKFold(
                options.folds, shuffle=True, random_state=options.seed + repetition
            )
            for number, rows in enumerate(sets.values()):
                member = np.isin(genes, rows)
                for train, test in splitter.split(genes, member):
                    for name, values in features.items():
                        linear = LogisticRegression(
                            solver="newton-cholesky", max_iter=1000, class_weight="balanced"
                        )
                        fitted = make_pipeline(StandardScaler(), linear).fit(
                            values[genes[train]], member[train]
                        )
                        scores = fitted.decision_function(values[genes[test]])
                        terms[name][number, repetition, genes[test]] = auroc_terms(
                            member[test], scores
                        )
        return terms


def _members(
    context: Context, path: Path, sets: Mapping[str, list[str]], expressed: np.ndarray, fewest: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Vocabulary rows of each set of at least `fewest` genes, ascending, and their numbers; prints
    the coverage.
    """
    rows = rows_of_names(
        {name for genes in sets.values() for name in genes}, context.model.vocabulary
    )
    n_known = sum(row >= 0 for row in rows.values())
    if not n_known:
        raise DataError(
            f"{path}: none of its {len(rows):,} genes is one of the model's, such as {min(rows)!r}; name genes by "
            "Ensembl id or current symbol, of the model's organism"
        )
    n_genes = int(expressed.sum())
    kept = {}
    for name, genes in sets.items():
        usable = np.unique(
            [row for gene in genes if (row := rows[gene]) >= 0 and expressed[row]]
        ).astype(np.int64)
        if fewest <= len(usable) <= n_genes - fewest:
            kept[name] = usable
    left_out = ", ".join(sorted(set(sets) - set(kept)))
    print(
        f"{context.dataset}: gene_embedding: {path}: {n_known:,} of {len(rows):,} genes are the model's; "
        f"{len(kept):,} of {len(sets):,} sets have {fewest} or more that training cells express, and lack as many"
        + (f"\n{context.dataset}: gene_embedding: left out: {left_out}" if left_out else ""),
        flush=True,
    )
    sizes = {name: len(usable) for name, usable in kept.items()}
    numbers = {
        "named_genes": len(rows),
        "known_genes": n_known,
        "sets": len(kept),
        "genes_of_sets": sizes,
    }
    return kept, numbers | {"left_out": left_out or "none"}


class Grn(GeneTask):
    config: GrnConfig

    def judge(
        self, context: Context, vectors: dict[str, np.ndarray], profiles: sp.csr_matrix
    ) -> TaskResult:
        """AUROC and AUPRC of each kind of features. Raises DataError where too few edges have genes
        of the model.
        """
        config, path, vocabulary = self.config, Path(self.config.edges), context.model.vocabulary
        edges = read_edges(path)
        known = known_edges(edges, vocabulary, np.asarray(profiles.sum(axis=0)).ravel() > 0)
        n_known = len(known)
        if n_known < config.min_edges:
            named = rows_of_names((name for edge in edges for name in edge), vocabulary)
            absent = sorted(name for name, row in named.items() if row < 0)
            such = f", not {', '.join(absent[:3])}" if absent else ""
            raise DataError(
                f"{path}: {len(edges) - n_known:,} of {len(edges):,} edges have a gene that the model does not know or "
                f"its training cells do not express; expected {config.min_edges:,} others, got {n_known:,}: name genes "
                f"by Ensembl id or current symbol{such}, or lower evaluate.tasks.grn.min_edges"
            )
        factors, targets, edge, few = network_of(known, config.min_targets)
        line = (
            f"{n_known:,} of {len(edges):,} edges have two genes that the model knows and its training cells "
            f"express; {len(factors):,} factors have {config.min_targets} targets or more"
        )
        print(f"{context.dataset}: grn: {path}: {line}", flush=True)
        left_out = ", ".join(sorted(vocabulary.symbols[row] for row in few))
        if left_out:
            print(f"{context.dataset}: grn: left out: {left_out}", flush=True)
        if not len(factors):
            raise DataError(
                f"{path}: {line}; lower evaluate.tasks.grn.min_targets, or give more edges"
            )
        similarities = {}
        for name, values in vectors.items():
            centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
            unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
            similarities[name] = np.asarray(unit[factors] @ unit[targets].T)
        del similarities[RANDOM]  # rankings, several of them, are drawn below
        ends = [profiles[:, genes].toarray() for genes in (factors, targets)]
        similarities["co-expression, Pearson"] = correlations(*ends)
        similarities["co-expression, Spearman"] = correlations(
            *(rankdata(values, axis=0) for values in ends)
        )
        if config.absolute:
            similarities = {name: np.abs(values) for name, values in similarities.items()}
        candidate = factors[:, None] != targets
        columns, pooled = _ranked(similarities, edge, candidate, context.options.seed)
        numbers = {
            "edges": len(edges),
            "known_edges": n_known,
            "factors": len(factors),
            "targets": len(targets),
            "share_of_edges": float(edge[candidate].mean()),
            "left_out": left_out or "none",
        }
        rows = [row | pooled[row["name"]] for row in table_rows(columns)]
        return TaskResult.from_columns(columns, numbers, rows=rows)


def _ranked(
    similarities: Mapping[str, np.ndarray], edge: np.ndarray, candidate: np.ndarray, seed: int
) -> tuple[list[ScoreColumn], dict[str, dict[str, float]]]:
    """A column for each score, with the factors as units, and scores over all pairs by row.

    `edge` and `candidate` are (factors, targets) bool, as are the pairs of `similarities`.
    """

    def scored(
        function: Callable[[np.ndarray, np.ndarray], float], values: np.ndarray
    ) -> tuple[np.ndarray, float]:
        by_factor = [
            function(row[pair], own[pair]) for row, pair, own in zip(edge, candidate, values)
        ]
        return np.array([by_factor]), function(edge[candidate], values[candidate])

    columns = []
    pooled: dict[str, dict[str, float]] = {name: {} for name in (*similarities, "random")}
    for score, function in (("AUROC", auroc), ("AUPRC", average_precision)):
        heading = f"{score}, all pairs"
        scores = {}
        for name, values in similarities.items():
            scores[name], pooled[name][heading] = scored(function, values)
        generator = seeded(seed, 8)
        drawn = [scored(function, generator.random(edge.shape)) for _ in range(DRAWS)]
        scores["random"] = np.mean([by_factor for by_factor, _ in drawn], axis=0)
        pooled["random"][heading] = float(np.mean([of_all for _, of_all in drawn]))
        columns.append(ScoreColumn(score, f"{score} of edges", scores))
    return columns, pooled


def known_edges(
    edges: Iterable[tuple[str, str]], vocabulary: Vocabulary, usable: np.ndarray
) -> np.ndarray:
    """(edges, 2) int64: vocabulary rows of the edges of two different genes of `usable`, (genes,)
    bool, each once.
    """
    rows = rows_of_names((name for edge in edges for name in edge), vocabulary)
    pairs = np.array([(rows[factor], rows[target]) for factor, target in edges], np.int64)
    found = (pairs >= 0).all(1) & (pairs[:, 0] != pairs[:, 1]) & usable[pairs].all(1)
    return np.unique(pairs[found], axis=0)


def network_of(
    pairs: np.ndarray, min_targets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Factors and targets, rows of the vocabulary, ascending; edges, (factors, targets) bool; and
    factors left out.

    These have too few targets, or no gene that is not a target.
    """
    factors = np.unique(pairs[:, 0])
    targets = np.unique(pairs[:, 1])
    edge = np.zeros((len(factors), len(targets)), bool)
    edge[np.searchsorted(factors, pairs[:, 0]), np.searchsorted(targets, pairs[:, 1])] = True
    n_edges = edge.sum(1)
    n_others = (factors[:, None] != targets).sum(1) - n_edges
    kept = (n_edges >= min_targets) & (n_others > 0)
    return factors[kept], targets, edge[kept], factors[~kept]


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(m, n) float64: Pearson of the columns of `first` (cells, m) and `second` (cells, n); 0 for
    constant ones.
    """
    standard = []
    for values in (first, second):
        centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
        length = np.linalg.norm(centred, axis=0)
        standard.append(np.divide(centred, length, out=np.zeros_like(centred), where=length > 1e-9))
    return np.asarray(standard[0].T @ standard[1])
