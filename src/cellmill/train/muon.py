"""Muon for the matrices of the blocks, AdamW for everything else.

The update of a matrix is its momentum (Nesterov's) made orthogonal: all singular values about 1.
This needs the whole matrix, so each has one owner among the ranks that share it: shards of the
momentum go to their owners in one all-to-all, the owners orthogonalise, and shards of the updates
come back in a second. Owners have about equal work. A rank that holds whole matrices (ddp,
NO_SHARD) orthogonalises all of them itself.

An update is multiplied by 0.2 * sqrt(larger side): its root mean square is then that of AdamW's
updates, and both share one learning rate. A bad step is skipped without a wait of the host, as in
fused AdamW.

Source: Jordan et al. 2024 (Muon: an optimizer for hidden layers), with the scale of Liu et al. 2025 (Muon is scalable
for LLM training), section 2.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cellmill.config.run import Train
from cellmill.parallel.mesh import local_of, mesh_of
from cellmill.parallel.torch_private import flatten_axes

MOMENTUM = 0.95
SCALE = 0.2
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that moves every singular value towards 1
EPS = 1e-7

Block = Sequence[int]  # first row, last row + 1, first column, last column + 1 of a rank's shard


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition, roughly: singular values are between 0.7
    and 1.2.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Return the owner of each matrix, 0 to `ranks` - 1: the largest first, to the rank with the
    least work so far.
    """
    work = [0] * ranks
    chosen = [0] * len(shapes)
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        chosen[index] = work.index(min(work))
        work[chosen[index]] += costs[index]
    return chosen


class _Shared:
    """Matrices of a group, which the same ranks share in the same way. Collective: every rank that
    shares them.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        mesh = mesh_of(matrices[0])
        # ranks with different shards; None if this one has whole matrices
        self.group: dist.ProcessGroup | None = None
        if mesh is None:
            return
        sharded_dims = set()
        for matrix in matrices:
            for dim, placement in enumerate(matrix.placements):  # type: ignore[attr-defined]
                if not placement.is_replicate():
                    sharded_dims.add(dim)
        axes = [
            name
            for dim, name in enumerate(mesh.mesh_dim_names or ())
            if dim in sharded_dims and mesh.size(dim) > 1
        ]
        if not axes:
            return
        # the same name as in `build_mesh`, where every rank made it
        self.group = (
            mesh[axes[0]] if len(axes) == 1 else flatten_axes(mesh[tuple(axes)], "shard_tp")
        ).get_group()
        ranks = dist.get_world_size(self.group)
        corners = []
        for matrix in matrices:
            [part] = matrix.__create_chunk_list__()  # type: ignore[attr-defined]  # this rank's, as a checkpoint stores it
            (row, column), (rows, columns) = part.offsets, part.sizes
            corners.append((row, row + rows, column, column + columns))
        own = torch.tensor(corners, device=local_of(matrices[0]).device)
        everyone = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(everyone, own, group=self.group)
        # by matrix, then by rank
        self.blocks: list[list[Block]] = torch.stack(everyone, 1).tolist()
        self.owner = owners([(matrix.shape[0], matrix.shape[1]) for matrix in matrices], ranks)

    def orthogonalised(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the shards of the orthogonalised matrices. Collective: every rank of the group."""
        if self.group is None:
            return [orthogonalised(shard) for shard in shards]
        every = range(dist.get_world_size(self.group))
        own = dist.get_rank(self.group)
        of_owner = [[i for i, owner in enumerate(self.owner) if owner == rank] for rank in every]
        theirs = [i for owned in of_owner for i in owned]  # the order of what is sent
        whole = {i: shards[0].new_empty(self.matrices[i].shape) for i in of_owner[own]}
        # what each rank has of the matrices that this one owns, in the order in which it arrives
        views = [[_cut(whole[i], self.blocks[i][rank]) for i in whole] for rank in every]
        sent = [sum(shards[i].numel() for i in owned) for owned in of_owner]
        kept = [sum(view.numel() for view in of_rank) for of_rank in views]
        packed = torch.cat([shards[i].flatten() for i in theirs])
        gathered = packed.new_empty(sum(kept))
        dist.all_to_all_single(gathered, packed, kept, sent, group=self.group)
        arrived = [view for of_rank in views for view in of_rank]
        for view, part in zip(arrived, gathered.split([view.numel() for view in arrived])):
            view.copy_(part.view_as(view))
        for matrix in whole.values():
            matrix.copy_(orthogonalised(matrix))
        updates = torch.empty_like(packed)
        cut = torch.cat([gathered.new_empty(0), *(view.flatten() for view in arrived)])
        dist.all_to_all_single(updates, cut, sent, kept, group=self.group)
        returned = dict(zip(theirs, updates.split([shards[i].numel() for i in theirs])))
        return [returned[i].view_as(shard) for i, shard in enumerate(shards)]


class Muon(torch.optim.AdamW):
    """Muon for groups with `matrices` true, fused AdamW for the others; float32. Collective: every
    rank.
    """

    param_groups: list[dict[str, Any]]
    # scalar; the step changes nothing where it is 1, as in fused AdamW
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        super().__init__(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)
        self._shared = [
            _Shared(group["params"]) for group in self.param_groups if group.get("matrices")
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        every = self.param_groups
        matrices = [group for group in every if group.get("matrices")]
        for group, shared in zip(matrices, self._shared):
            nesterov = []
            moments = []
            for matrix in shared.matrices:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                gradient = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
                moments.append(MOMENTUM * local_of(state["momentum"]) + local_of(gradient))
                nesterov.append(MOMENTUM * moments[-1] + local_of(gradient))
            updates = shared.orthogonalised(nesterov)
            skipped = self.found_inf
            for matrix, moment, update in zip(shared.matrices, moments, updates):
                if matrix.grad is None:  # as AdamW: it does not train in this step
                    continue
                own = local_of(matrix)
                kept = local_of(self.state[matrix]["momentum"])
                scale = group["lr"] * SCALE * max(matrix.shape) ** 0.5
                stepped = own * (1 - group["lr"] * group["weight_decay"]) - scale * update
                own.copy_(stepped if skipped is None else torch.where(skipped > 0, own, stepped))
                kept.copy_(moment if skipped is None else torch.where(skipped > 0, kept, moment))
        self.param_groups = [group for group in every if not group.get("matrices")]
        try:
            super().step()
        finally:
            self.param_groups = every


def _cut(matrix: Tensor, block: Block) -> Tensor:
    return matrix[block[0] : block[1], block[2] : block[3]]
