"""Cross-entropy over a token table, in chunks (`parallel.chunked_loss`).

With tensor parallel, each target of a chunk needs three numbers from the other ranks (Megatron-LM, Shoeybi et al. 2019,
section 3).

Legend: N targets, H hidden, V local rows of the table.
"""

from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist

from cellmill.parallel.chunked_loss import chunked_loss


def token_loss(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits `states @ table.T + bias`, summed over the targets; see `chunked_loss`.

    Parameters
    ----------
    states, table, bias, answers
        (N, H), (V, H), a plain tensor or a DTensor sharded by rows, (V,) and (N,) int64.
    """
    return chunked_loss(states, table, bias, _Answers(answers))


def profile_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    entries: list[int],
    starts: torch.Tensor,
    genes: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As `token_loss`, of N targets that are distributions over the vocabulary.

    Parameters
    ----------
    entries
        Number of entries of each target, N integers.
    starts
        (N + 1,) int64: the first entry of each target, and their number. On the device: reading `entries` to it would
        wait for it.
    genes, weights
        Token id, int64, and probability, float32, of each entry, target after target. No gene occurs twice in one
        target; the weights of a target sum to 1.
    """
    return chunked_loss(states, table, bias, _Profiles(entries, starts, genes, weights))


class _Asked(Protocol):
    """Targets of a chunk, and their terms of its logits' gradient (n, V)."""

    def picked(self, logits: torch.Tensor) -> torch.Tensor:
        """(n,): the logit of each target, or the expected one."""
        ...

    def subtract_from(self, probabilities: torch.Tensor) -> None:
        """Turn probabilities (n, V) into the gradient of the logits, in place."""
        ...


class _Targets:
    """Targets of a cross-entropy."""

    first_row = 0

    def of(self, start: int, logits: torch.Tensor) -> _Asked:
        """Return the targets from `start` on whose float32 `logits` (n, V) are given."""
        raise NotImplementedError

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[()]]:
        """See `chunked_loss.Targets`."""
        return _loss_and_gradient(logits, self.of(start, logits), group), ()


class _Answers(_Targets):
    """One token for each target."""

    def __init__(self, answers: torch.Tensor) -> None:
        self.answers = answers

    def of(self, start: int, logits: torch.Tensor) -> "_Rows":
        answers, rows = self.answers[start : start + len(logits)] - self.first_row, logits.shape[1]
        return _Rows(answers.clamp(0, max(rows - 1, 0)), (answers >= 0) & (answers < rows))


class _Rows:
    """Rows (n,) of this rank's table that a chunk's targets ask for, and whether they are this rank's at all."""

    def __init__(self, rows: torch.Tensor, inside: torch.Tensor) -> None:
        self.rows, self.inside = rows[:, None], inside

    def picked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.gather(1, self.rows)[:, 0] * self.inside

    def subtract_from(self, probabilities: torch.Tensor) -> None:
        less = probabilities.gather(1, self.rows) - self.inside.to(probabilities.dtype)[:, None]
        probabilities.scatter_(1, self.rows, less)


class _Profiles(_Targets):
    """A sparse distribution for each target."""

    def __init__(self, entries: list[int], starts: torch.Tensor, genes: torch.Tensor, weights: torch.Tensor) -> None:
        self.starts, self.genes, self.weights = starts, genes, weights
        self.ends = [0, *accumulate(entries)]

    def of(self, start: int, logits: torch.Tensor) -> "_Distribution":
        n, rows = logits.shape
        if not rows:
            return _Distribution(logits)
        own = slice(self.ends[start], self.ends[start + n])
        lengths = self.starts[start : start + n + 1].diff()
        target = torch.repeat_interleave(lengths, output_size=own.stop - own.start)
        genes = self.genes[own] - self.first_row
        inside = (genes >= 0) & (genes < rows)
        # dense, so that sums have one order on every device; entries of other ranks add 0 to a row of this one
        dense = torch.zeros_like(logits)
        dense.index_put_((target, genes.clamp(0, rows - 1)), self.weights[own] * inside, accumulate=True)
        return _Distribution(dense)


class _Distribution:
    """Probabilities (n, V) that a chunk's targets ask for."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense

    def picked(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits * self.dense).sum(1)

    def subtract_from(self, probabilities: torch.Tensor) -> None:
        probabilities.sub_(self.dense)


def _loss_and_gradient(logits: torch.Tensor, targets: _Asked, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the summed loss of float32 `logits` (n, V), which become its gradient in place."""
    count, rows = logits.shape
    maximum = logits.amax(1) if rows else logits.new_full((count,), -torch.inf)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    logits.sub_(maximum[:, None])
    correct = targets.picked(logits) if rows else torch.zeros_like(maximum)
    sums = torch.stack([logits.exp_().sum(1), correct])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits.div_(sums[0][:, None])
    if rows:
        targets.subtract_from(logits)
    return (sums[0].log() - sums[1]).sum()
