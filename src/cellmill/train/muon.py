"""Muon for the matrices of the blocks, AdamW for everything else.

The update of a matrix is its momentum (Nesterov's) made orthogonal: all singular values about 1.
This needs the whole matrix, so each has one owner among the ranks that share it: shards of the
momentum go to their owners in one all-to-all, the owners orthogonalise, and shards of the updates
come back in a second. Owners have about equal work. A rank that holds whole matrices (ddp,
NO_SHARD) orthogonalises all of them itself.

An update is multiplied by 0.2 * sqrt(larger side): its root mean square is then that of AdamW's
updates, and both share one learning rate. A bad step is skipped without a wait of the host, as in
fused AdamW.

Source: Jordan et al. 2024 (Muon: an optimizer for hidden layers), with the scale of Liu et al. 2025
(Muon is scalable for LLM training), section 2.2.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cellmill.config.run import Train
from cellmill.parallel.mesh import get_mesh, to_local
from cellmill.parallel.torch_private import flatten_axes

MOMENTUM = 0.95
SCALE = 0.2
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that moves every singular value towards 1."""
EPS = 1e-7

Block = Sequence[int]
"""First row, last row + 1, first column and last column + 1 of a rank's shard."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return roughly U V^T of the singular value decomposition.

    Singular values are between 0.7 and 1.2.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if is_tall else x


def choose_owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Return the owner of each matrix, 0 to `ranks` - 1.

    The largest matrix is given first, each to the rank with the least work so far.
    """
    work = [0] * ranks
    owners = [0] * len(shapes)
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return owners


class _SharedMatrices:
    """Matrices of a group, which the same ranks share in the same way. Collective over these ranks."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        self.group = _sharing_group(matrices)
        if self.group is None:
            return
        corners = []
        for matrix in matrices:
            # this rank's part, as a checkpoint stores it
            [part] = matrix.__create_chunk_list__()  # type: ignore[attr-defined]
            row, column = part.offsets
            rows, columns = part.sizes
            corners.append((row, row + rows, column, column + columns))
        ranks = dist.get_world_size(self.group)
        local = torch.tensor(corners, device=to_local(matrices[0]).device)
        by_rank = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(by_rank, local, group=self.group)
        self.blocks: list[list[Block]] = torch.stack(by_rank, 1).tolist()
        """Shard of each matrix (outer list) on each rank (inner list)."""
        owners = choose_owners([(len(matrix), matrix.shape[1]) for matrix in matrices], ranks)
        self.owned: list[list[int]] = [[] for _ in range(ranks)]
        """Indices of the matrices that each rank owns."""
        for index, owner in enumerate(owners):
            self.owned[owner].append(index)

    def orthogonalise(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the shards of the orthogonalised matrices. Collective over the ranks that share."""
        if self.group is None:
            return [orthogonalise(shard) for shard in shards]
        # shards go to their owners: first those of rank 0
        sent_order = list(chain.from_iterable(self.owned))
        sent_sizes = []
        for indices in self.owned:
            sent_sizes.append(sum(shards[index].numel() for index in indices))
        sent = torch.cat([shards[index].flatten() for index in sent_order])
        # the matrices that this rank owns, and views of every rank's shards in them, as they arrive
        matrices = {
            index: sent.new_empty(self.matrices[index].shape)
            for index in self.owned[dist.get_rank(self.group)]
        }
        views = []
        received_sizes = []
        for rank in range(len(self.owned)):
            rank_views = [_cut(matrices[index], self.blocks[index][rank]) for index in matrices]
            received_sizes.append(sum(view.numel() for view in rank_views))
            views += rank_views
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)
        for view, part in zip(views, received.split([view.numel() for view in views])):
            view.copy_(part.view_as(view))
        for matrix in matrices.values():
            matrix.copy_(orthogonalise(matrix))
        # the way back, with the sizes exchanged
        updates = torch.empty_like(sent)
        returned = torch.cat([received.new_empty(0), *(view.flatten() for view in views)])
        dist.all_to_all_single(updates, returned, sent_sizes, received_sizes, group=self.group)
        parts = updates.split([shards[index].numel() for index in sent_order])
        by_index = dict(zip(sent_order, parts))
        return [by_index[index].view_as(shard) for index, shard in enumerate(shards)]


def _sharing_group(matrices: list[Tensor]) -> dist.ProcessGroup | None:
    """Return the ranks with different shards of the matrices; None if each has whole matrices."""
    mesh = get_mesh(matrices[0])
    if mesh is None:
        return None
    sharded_dims = set()
    for matrix in matrices:
        for dim, placement in enumerate(matrix.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                sharded_dims.add(dim)
    axes = []
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if dim in sharded_dims and mesh.size(dim) > 1:
            axes.append(name)
    if not axes:
        return None
    if len(axes) == 1:
        return mesh[axes[0]].get_group()
    # the same name as in `build_mesh`, where every rank made it
    return flatten_axes(mesh[tuple(axes)], "shard_tp").get_group()


class Muon(torch.optim.AdamW):
    """Muon for groups with `matrices` true, fused AdamW for the others; float32. Collective."""

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None = None
    """Scalar; the step changes nothing if it is 1, as in fused AdamW."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        super().__init__(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)
        self._shared = [
            _SharedMatrices(group["params"]) for group in self.param_groups if group.get("matrices")
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        all_groups = self.param_groups
        matrix_groups = [group for group in all_groups if group.get("matrices")]
        for group, shared in zip(matrix_groups, self._shared):
            self._step_matrices(group, shared)
        self.param_groups = [group for group in all_groups if not group.get("matrices")]
        try:
            super().step()
        finally:
            self.param_groups = all_groups

    def _step_matrices(self, group: dict[str, Any], shared: _SharedMatrices) -> None:
        moments = []
        nesterov = []
        for matrix in shared.matrices:
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            gradient = to_local(torch.zeros_like(matrix) if matrix.grad is None else matrix.grad)
            moment = MOMENTUM * to_local(state["momentum"]) + gradient
            moments.append(moment)
            nesterov.append(MOMENTUM * moment + gradient)
        updates = shared.orthogonalise(nesterov)
        for matrix, moment, update in zip(shared.matrices, moments, updates):
            if matrix.grad is None:  # as AdamW: it does not train in this step
                continue
            weights = to_local(matrix)
            scale = group["lr"] * SCALE * max(matrix.shape) ** 0.5
            decayed = weights * (1 - group["lr"] * group["weight_decay"])
            self._write(weights, decayed - scale * update)
            self._write(to_local(self.state[matrix]["momentum"]), moment)

    def _write(self, target: Tensor, value: Tensor) -> None:
        """Copy `value` into `target`, unless the step is skipped."""
        if self.found_inf is not None:
            value = torch.where(self.found_inf > 0, target, value)
        target.copy_(value)


def _cut(matrix: Tensor, block: Block) -> Tensor:
    first_row, end_row, first_column, end_column = block
    return matrix[first_row:end_row, first_column:end_column]
