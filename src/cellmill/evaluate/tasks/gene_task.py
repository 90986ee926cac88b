"""What tasks `gene_embedding` and `grn` have in common: their base, the AUROC, and the reader of their
files (docs/evaluation.md).
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
    """Base of the tasks that score vectors of genes.

    Such a task reads no cells of the evaluated datasets. So its result is computed once, and holds for all
    datasets.
    """

    reads_cells = False

    def run(self, context: Context) -> TaskResult:
        """Scores of the gene vectors of the model and of baselines. Raises Skipped for a model without gene
        vectors.
        """
        model = context.model
        vectors = gene_vectors(model)
        if not vectors:
            raise Skipped(f"family {model.config['family']} has no vectors of genes")
        vectors[LOADINGS] = scaled_loadings(model.components)
        return self.score(context, vectors, model.training_profiles())

    def estimate_s(self, sizes: DatasetSizes) -> float:
        """Seconds to read training cells, and to fit principal components to them."""
        return sizes.training_components_s()

    def score(self, context: Context, vectors: ByMethod, profiles: sp.csr_matrix) -> TaskResult:
        """Scores of gene vectors. `vectors` are (genes, width) by method. `profiles`, (cells, genes), are
        log-normalised training cells, which baselines are computed from.
        """
        raise NotImplementedError


def read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and fields of each line of a file with tabs between the fields.

    Empty lines and comments, which begin with #, are left out. Raises DataError if no line is left, or if
    the file is not UTF-8 text.
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


def compute_auroc(is_member: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve of `scores`, (n,). `is_member` is (n,) bool.

    The area is the share of pairs of a member and a non-member in which the member has the higher score.
    Pairs with equal scores count half.
    """
    return float(_compute_placements(is_member, scores)[is_member].mean())


def compute_auroc_terms(is_member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """A term for each of the scores, (n,) float64. The mean of the terms is the AUROC, and the variance of
    this mean is DeLong's variance of the AUROC (DeLong et al. 1988, Biometrics 44:837).
    """
    placements = _compute_placements(is_member, scores)
    auroc = placements[is_member].mean()
    n_members = is_member.sum()
    n_others = len(is_member) - n_members
    # weighted so that the sum over members and the sum over non-members count alike
    weight = np.where(is_member, len(is_member) / n_members, len(is_member) / n_others)
    terms: np.ndarray = auroc + weight * (placements - auroc)
    return terms


def _compute_placements(is_member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The placement of each score, (n,) float64. For a member it is the share of non-members with a lower
    score. For a non-member it is the share of members with a higher score. Equal scores count half.

    The mean over members and the mean over non-members are both the AUROC.
    """
    n_members = int(is_member.sum())
    n_others = len(is_member) - n_members
    ranks = rankdata(scores)
    # The rank of a score among all scores, minus its rank in its own group, is the number of lower
    # scores in the other group.
    n_lower_others = ranks[is_member] - rankdata(scores[is_member])
    n_lower_members = ranks[~is_member] - rankdata(scores[~is_member])
    placements = np.empty(len(is_member))
    placements[is_member] = n_lower_others / n_others
    placements[~is_member] = 1 - n_lower_members / n_members
    return placements
