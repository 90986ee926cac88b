"""Base of the tasks on vectors of genes, `gene_embedding` and `grn` (docs/evaluation.md), the AUROC, and
the reader of their files.
"""

from pathlib import Path

import numpy as np
import scipy.sparse as sp
from scipy.stats import rankdata

from cellmill.errors import DataError
from cellmill.evaluate.features.gene_vectors import LOADINGS, gene_vectors, scaled_loadings
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.files import require_file
from cellmill.runs.results import TaskResult


class GeneTask(Task):
    """Task on the vectors of genes: it reads no cells of a dataset, so its result is computed once
    for all of them.
    """

    reads_cells = False

    def run(self, context: Context) -> TaskResult:
        """Scores of each kind of gene features; skipped for a model without gene vectors."""
        model = context.model
        vectors = gene_vectors(model)
        if not vectors:
            raise Skipped(f"family {model.config['family']} has no vectors of genes")
        vectors[LOADINGS] = scaled_loadings(model.components)
        return self.score(context, vectors, model.training_profiles())

    def estimate_s(self, sizes: DatasetSizes) -> float:
        """Seconds to read training cells, and to fit their components."""
        return sizes.training_components_s()

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """Scores of `vectors` (genes, width); `profiles` (cells, genes) are log-normalised
        training cells.
        """
        raise NotImplementedError


def read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line that is neither empty nor a comment (#). Raises DataError if
    there is none.
    """
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split("\t")]
            lines.append((number, fields))
    if not lines:
        raise DataError(f"{path}: empty")
    return lines


def auroc(member: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs of a member and a non-member in which the member has the higher score; ties
    count half.
    """
    return float(placements(member, scores)[member].mean())


def placements(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: for a member the share of non-members with a lower score, for a non-member the
    share of members with a higher score.

    The mean over members and the mean over non-members are both the AUROC (DeLong et al. 1988,
    Biometrics 44:837).
    """
    n_members = int(member.sum())
    n_others = len(member) - n_members
    ranks = rankdata(scores)
    # a rank among all minus the rank in its own group is the number of lower scores in the other
    n_lower_others = ranks[member] - rankdata(scores[member])
    n_lower_members = ranks[~member] - rankdata(scores[~member])
    shares = np.empty(len(member))
    shares[member] = n_lower_others / n_others
    shares[~member] = 1 - n_lower_members / n_members
    return shares


def auroc_terms(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: terms whose mean is the AUROC and has DeLong's variance."""
    shares = placements(member, scores)
    area = shares[member].mean()
    n_members = member.sum()
    n_others = len(member) - n_members
    weight = np.where(member, len(member) / n_members, len(member) / n_others)
    terms: np.ndarray = area + weight * (shares - area)
    return terms
