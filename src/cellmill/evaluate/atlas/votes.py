"""Labels of cells by a vote of donors over the cells of their nearest points.

Every donor of a dataset has one vote, divided over the labels of its cells among the neighbours. So a
donor of many cells counts as much as a donor of few.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.rows import positions_in_rows, row_numbers, row_offsets
from cellmill.evaluate.atlas.search import NOWHERE

NO_LABEL = -1
_DIGITS = 9  # decimal digits in which votes are compared: sums of thirds differ in the last bits


class Votes(NamedTuple):
    """Votes for some cells."""

    labels: np.ndarray
    """(cells,) int64: index of the label with most votes; NO_LABEL without any vote."""
    agreement: np.ndarray  # (cells,) float64: its share of the votes; NaN without any
    shares: sp.csr_matrix  # (cells, labels) float64: shares of the votes by label
    n_donors: np.ndarray  # (cells,) int64: donors that voted


class Electorate:
    """Numbers of labelled cells by point, donor and label."""

    def __init__(
        self,
        points: np.ndarray,
        donors: np.ndarray,
        labels: np.ndarray,
        n_points: int,
        n_labels: int,
    ) -> None:
        """`points`, `donors` and `labels` are indices, `(cells,)` int; NO_LABEL for a missing label."""
        self.n_labels = n_labels
        cells = pd.DataFrame({"point": points, "donor": donors, "label": labels})
        counts = cells[labels != NO_LABEL].groupby(["point", "donor", "label"]).size()
        self._table = counts.rename("cells").reset_index()
        points_in_table = self._table["point"].to_numpy(np.int64)
        # first row of each point in the table, whose rows are sorted by point
        self._starts = row_offsets(np.bincount(points_in_table, minlength=n_points))

    def vote(self, neighbors: np.ndarray, left_out: np.ndarray | None = None) -> Votes:
        """Votes of the cells at the points `neighbors`, `(cells, k)`, the nearest first.

        Cells of the donors `left_out`, `(cells,)`, do not vote. If labels have equal votes, the
        label of the nearest neighbour wins, then the first one.
        """
        n = len(neighbors)
        ballots = self._collect_ballots(neighbors)
        if left_out is not None:
            ballots = ballots[ballots["donor"] != left_out[ballots["cell"]]]
        # each donor's vote, divided over labels
        by_donor = ballots.groupby(["cell", "donor", "label"])["cells"].sum()
        by_donor = by_donor / by_donor.groupby(["cell", "donor"]).transform("sum")
        # sum over donors, with the rank of the label's nearest neighbour
        tally = by_donor.groupby(["cell", "label"]).sum().rename("votes").to_frame()
        tally["rank"] = ballots.groupby(["cell", "label"])["rank"].min()
        tally = tally.reset_index()
        # each donor's shares sum to 1, so a cell's votes count its donors
        n_donors = tally.groupby("cell")["votes"].sum().reindex(range(n), fill_value=0)
        n_voting = n_donors.round().to_numpy(np.int64)
        cell = tally["cell"].to_numpy()
        tally["votes"] = (tally["votes"] / n_voting[cell]).round(_DIGITS)
        shares = sp.csr_matrix(
            (tally["votes"], (cell, tally["label"])), shape=(n, self.n_labels), dtype=np.float64
        )
        # the winner of each cell
        order = ["cell", "votes", "rank", "label"]
        tally = tally.sort_values(order, ascending=[True, False, True, True])
        winners = tally.drop_duplicates("cell").set_index("cell")
        labels = winners["label"].reindex(range(n), fill_value=NO_LABEL).to_numpy(np.int64)
        agreement = winners["votes"].reindex(range(n)).to_numpy(np.float64)
        return Votes(labels, agreement, shares, n_voting)

    def _collect_ballots(self, neighbors: np.ndarray) -> pd.DataFrame:
        """Rows of the table at the neighbours of each cell, with the `cell` and the neighbour's `rank`."""
        k = neighbors.shape[1]
        points = neighbors.ravel()
        starts = self._starts[points]
        n_rows = self._starts[points + 1] - starts
        n_rows[points == NOWHERE] = 0
        offsets = row_offsets(n_rows)
        neighbor = row_numbers(offsets)  # of each row, an index into `points`
        rows = starts[neighbor] + positions_in_rows(offsets)
        ballots = self._table.iloc[rows].reset_index(drop=True)
        ballots["cell"] = neighbor // k
        ballots["rank"] = neighbor % k
        return ballots
