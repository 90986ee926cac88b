"""Chunked losses equal torch's, and never hold the logits of all targets; sums have one order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributions import NegativeBinomial
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cellmill.parallel import likelihoods
from cellmill.parallel.likelihoods import profile_loss, token_loss
from cellmill.parallel.vocab_parallel import rows_at, segment_sum

ROWS = 50
HIDDEN = 8
ENTRIES = [3, 1, 40, 7, 12, *[2] * 18]  # of each target of a profile
TARGETS = len(ENTRIES)
DRAWS = torch.Generator().manual_seed(0)
ANSWERS = torch.randint(0, ROWS, (TARGETS,), generator=DRAWS)
GENES = torch.cat([torch.randperm(ROWS, generator=DRAWS)[:n] for n in ENTRIES])
COUNTS = torch.randint(1, 60, (len(GENES),), generator=DRAWS).float()
SHARES = torch.cat([counts / counts.sum() for counts in COUNTS.split(ENTRIES)])
STARTS = torch.tensor([0, *ENTRIES]).cumsum(0)
LIKELIHOODS = ["token", "profile", "nb"]


def _numbers(
    likelihood: str = "token", requires: tuple[bool, ...] = (True,) * 4
) -> list[torch.Tensor]:
    """States, table and bias; with nb the log of the inverse dispersion."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TARGETS, HIDDEN), (ROWS, HIDDEN), (ROWS,), (ROWS,))[: 4 if likelihood == "nb" else 3]
    return [
        torch.randn(shape, generator=generator).requires_grad_(on)
        for shape, on in zip(shapes, requires)
    ]


def _loss(numbers: list[torch.Tensor], likelihood: str = "token") -> torch.Tensor:
    states, table, bias, *dispersion = numbers
    if likelihood == "token":
        return token_loss(states, table, bias, ANSWERS)
    weights = COUNTS if likelihood == "nb" else SHARES
    return profile_loss(states, table, bias, ENTRIES, STARTS, GENES, weights, *dispersion)


def _torchs(numbers: list[torch.Tensor], likelihood: str = "token") -> torch.Tensor:
    states, table, bias, *dispersion = (x.double() for x in numbers)
    logits = F.linear(states, table, bias)
    if likelihood == "token":
        return F.cross_entropy(logits, ANSWERS, reduction="sum")
    at = torch.repeat_interleave(torch.tensor(ENTRIES)), GENES
    dense = (
        torch.zeros(TARGETS, ROWS)
        .index_put(at, SHARES if likelihood == "profile" else COUNTS)
        .double()
    )
    if likelihood == "profile":
        return F.cross_entropy(logits, dense, reduction="sum")
    mean = dense.sum(1, keepdim=True) * logits.softmax(1)
    inverse = dispersion[0].exp()
    log_p = NegativeBinomial(total_count=inverse, logits=mean.log() - inverse.log()).log_prob(dense)
    return -(log_p.sum(1) / dense.sum(1)).sum()


def _check_gradients(
    ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-5
) -> None:
    for one, other in zip(ours, theirs):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert one.grad.dtype == torch.float32
            torch.testing.assert_close(one.grad, other.grad, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=[1, 7, TARGETS, 100])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Targets of a chunk: one, several with a remainder, all, more than there are."""
    monkeypatch.setattr(likelihoods, "CPU_CHUNK_LOGITS", request.param * ROWS)
    return int(request.param)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_loss_and_gradients_equal_torch_for_any_chunk(chunk: int, likelihood: str) -> None:
    ours = _numbers(likelihood)
    theirs = _numbers(likelihood)
    found = _loss(ours, likelihood)
    expected = _torchs(theirs, likelihood)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    (0.3 * found).backward()
    (0.3 * expected).backward()
    _check_gradients(ours, theirs)


def test_loss_and_gradients_in_bf16_stay_near_torch(chunk: int) -> None:
    ours = _numbers()
    exact = _numbers()
    with torch.autocast("cpu", torch.bfloat16):
        found = _loss(ours)
    found.backward()
    expected = _torchs(exact)
    expected.backward()
    assert found.dtype == torch.float32
    assert abs(found.item() - expected.item()) > 1e-3, "computed in fp32"
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=1e-2)
    _check_gradients(ours, exact, 0.05)


@pytest.mark.parametrize(
    "requires", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_only_trained_inputs_get_a_gradient(requires: tuple[bool, ...]) -> None:
    ours = _numbers(requires=requires)
    theirs = _numbers(requires=requires)
    _loss(ours).backward()
    _torchs(theirs).backward()
    _check_gradients(ours, theirs)


def test_a_table_in_bf16_gets_a_bf16_gradient() -> None:
    numbers = [x.detach().bfloat16().requires_grad_() for x in _numbers()]
    _loss(numbers).backward()
    assert [x.grad.dtype for x in numbers if x.grad is not None] == [torch.bfloat16] * 3


def test_no_gradients_are_computed_without_need() -> None:
    numbers = _numbers()
    with torch.no_grad(), _Allocated() as seen:
        loss = _loss(numbers)
    assert loss.item() == _loss(numbers).item()
    assert not loss.requires_grad
    assert (ROWS, HIDDEN) not in seen.shapes


def test_no_tensor_as_large_as_all_logits_is_allocated_or_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(likelihoods, "CPU_CHUNK_LOGITS", 4 * ROWS)
    kept: list[int] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ),
        _Allocated() as seen,
    ):
        _loss(_numbers()).backward()
    assert max(torch.Size(shape).numel() for shape in seen.shapes) == ROWS * HIDDEN < TARGETS * ROWS
    # the gradients themselves, to be scaled
    assert sum(kept) == TARGETS * HIDDEN + ROWS * HIDDEN + ROWS


def test_a_second_backward_pass_is_refused() -> None:
    loss = _loss(_numbers())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Allocated(TorchDispatchMode):
    """Shapes of the outputs of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes |= {
            tuple(x.shape)
            for x in (out if isinstance(out, tuple) else (out,))
            if hasattr(x, "shape")
        }
        return out


@pytest.fixture
def two_threads() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(kept)


def test_sums_are_bitwise_equal_for_any_number_of_threads(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 700, 1, 2000, 0, 317, 0])
    cell = torch.repeat_interleave(lengths)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    index = cell[torch.randperm(len(cell), generator=generator)]
    rows = torch.randn(len(cell), 64, generator=generator)
    few = torch.randn(7, 64, generator=generator)

    def ours() -> list[Any]:
        x = rows.clone().requires_grad_()
        y = few.clone().requires_grad_()
        summed = segment_sum(x, cell, starts)
        spread = rows_at(y, index)
        ((summed * few).sum() + (spread * rows).sum()).backward()
        return [summed, x.grad, spread, y.grad, segment_sum(rows[:, 0], cell, starts)]

    found = ours()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(found, ours()))
    torch.set_num_threads(1)
    into = torch.zeros(7, 64)
    expected = [
        into.index_add(0, cell, rows),
        few[cell],
        few[index],
        into.index_add(0, index, rows),
    ]
    expected.append(torch.zeros(7).index_add(0, cell, rows[:, 0]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
