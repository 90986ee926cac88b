"""Scores of a ranking: area under the ROC curve, as a mean over genes that has an interval, and average precision."""

import numpy as np
from scipy.stats import rankdata


def auroc(member: np.ndarray, scores: np.ndarray) -> float:
    """Share of the pairs of a member and another in which the member has the higher score; ties count half.

    `member`, (n,) bool, has both kinds.
    """
    return float(placements(member, scores)[member].mean())


def placements(member: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(n,) float64: of a member the share of others with a lower score, of another that of members with a higher one.

    Means over the members and over the others are both the AUROC (DeLong et al. 1988, Biometrics 44:837).
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
    """Area under the curve of precision over recall, as steps; ties are one step.

    Its expectation for a random ranking is about the share of members.
    """
    order = np.argsort(-scores, kind="stable")
    hits, ranked = np.cumsum(member[order]), scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    precision, recall = hits[ends] / (ends + 1), hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0) * precision).sum())
