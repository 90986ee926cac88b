"""Labels of cells by a vote of donors.

The voters of a cell are the donors of the cells at its nearest points. Each donor has one vote. The vote
is divided over the labels of the donor's cells at these points. So a donor with many cells counts as much
as a donor with few cells.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.rows import positions_in_rows, row_numbers, row_offsets
from cellmill.evaluate.atlas.search import NOWHERE

NO_LABEL = -1  # index of the label of a cell without a label
# Votes are rounded to this many decimals before they are compared. Sums of thirds, for example, differ
# in their last bits.
_DIGITS = 9


class Votes(NamedTuple):
    """Results of the votes on some cells."""

    labels: np.ndarray  # (cells,) int64: index of the label with most votes; NO_LABEL without votes
    agreement: np.ndarray  # (cells,) float64: share of the votes for that label; NaN without votes
    shares: sp.csr_matrix  # (cells, labels) float64: share of the votes for each label
    n_donors: np.ndarray  # (cells,) int64: number of donors that voted


class Electorate:
    """The labelled cells that vote: how many cells each point, donor and label has."""

    def __init__(
        self,
        points: np.ndarray,
        donors: np.ndarray,
        labels: np.ndarray,
        n_points: int,
        n_labels: int,
    ) -> None:
        """`points`, `donors` and `labels` are the indices of each cell, `(cells,)` int.

        A cell without a label has NO_LABEL, and does not vote.
        """
        self.n_labels = n_labels
        cells = pd.DataFrame({"point": points, "donor": donors, "label": labels})
        # a row for each point, donor and label with cells; column `cells` is their number
        counts = cells[labels != NO_LABEL].groupby(["point", "donor", "label"]).size()
        self._table = counts.rename("cells").reset_index()
        points_in_table = self._table["point"].to_numpy(np.int64)
        # The rows of the table are sorted by point. These are the first row of each point, and the end.
        self._starts = row_offsets(np.bincount(points_in_table, minlength=n_points))

    def vote(self, neighbors: np.ndarray, left_out: np.ndarray | None = None) -> Votes:
        """Vote on cells with the points `neighbors`, `(cells, k)`, the nearest first.

        If `left_out`, `(cells,)`, is given, the donor with this index does not vote on the cell. If labels
        have equal votes, the label with the nearest neighbour wins. If these labels have the same nearest
        neighbour, the first label wins.
        """
        n_cells = len(neighbors)
        ballots = self._collect_ballots(neighbors)
        if left_out is not None:
            ballots = ballots[ballots["donor"] != left_out[ballots["cell"]]]

        # the vote of each donor, divided over labels
        by_donor = ballots.groupby(["cell", "donor", "label"])["cells"].sum()
        by_donor = by_donor / by_donor.groupby(["cell", "donor"]).transform("sum")

        # the sum over donors, with the rank of the label's nearest neighbour
        tally = by_donor.groupby(["cell", "label"]).sum().rename("votes").to_frame()
        tally["rank"] = ballots.groupby(["cell", "label"])["rank"].min()
        tally = tally.reset_index()

        # The shares of a donor sum to 1, so the sum of a cell's votes is the number of donors. Dividing
        # by this number makes shares of the votes.
        vote_sums = tally.groupby("cell")["votes"].sum().reindex(range(n_cells), fill_value=0)
        n_donors = vote_sums.round().to_numpy(np.int64)
        cell = tally["cell"].to_numpy()
        tally["votes"] = (tally["votes"] / n_donors[cell]).round(_DIGITS)
        shares = sp.csr_matrix(
            (tally["votes"], (cell, tally["label"])),
            shape=(n_cells, self.n_labels),
            dtype=np.float64,
        )

        # the winner of each cell
        order = ["cell", "votes", "rank", "label"]
        tally = tally.sort_values(order, ascending=[True, False, True, True])
        winners = tally.drop_duplicates("cell").set_index("cell")
        labels = winners["label"].reindex(range(n_cells), fill_value=NO_LABEL).to_numpy(np.int64)
        agreement = winners["votes"].reindex(range(n_cells)).to_numpy(np.float64)
        return Votes(labels, agreement, shares, n_donors)

    def _collect_ballots(self, neighbors: np.ndarray) -> pd.DataFrame:
        """Take the rows of the table at the neighbours of each cell.

        Each row also has `cell`, the index of the cell, and `rank`, the rank of the neighbour among the k.
        """
        k = neighbors.shape[1]
        points = neighbors.ravel()
        starts = self._starts[points]
        n_rows = self._starts[points + 1] - starts
        n_rows[points == NOWHERE] = 0
        offsets = row_offsets(n_rows)
        neighbor = row_numbers(offsets)  # the neighbour of each taken row, as an index of `points`
        rows = starts[neighbor] + positions_in_rows(offsets)
        ballots = self._table.iloc[rows].reset_index(drop=True)
        ballots["cell"] = neighbor // k
        ballots["rank"] = neighbor % k
        return ballots
