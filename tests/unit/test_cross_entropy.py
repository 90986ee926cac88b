"""The chunked loss equals torch's cross-entropy and never holds the logits of all targets."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cellmill.parallel import likelihoods
from cellmill.parallel.likelihoods import token_loss

TARGETS, ROWS, HIDDEN = 23, 50, 8


def _numbers(requires: tuple[bool, bool, bool] = (True, True, True)) -> list[torch.Tensor]:
    """States, table, bias and answers."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TARGETS, HIDDEN), (ROWS, HIDDEN), (ROWS,))
    made = [torch.randn(shape, generator=generator).requires_grad_(on) for shape, on in zip(shapes, requires)]
    return [*made, torch.randint(0, ROWS, (TARGETS,), generator=generator)]


def _torchs(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(states, table, bias).float(), answers, reduction="sum")


@pytest.fixture(params=[1, 7, 23, 100])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Targets of a chunk: one, several with a remainder, all, more than there are."""
    monkeypatch.setitem(likelihoods.ELEMENTS, "cpu", request.param * ROWS)
    return int(request.param)


def test_loss_and_gradients_are_torchs_whatever_the_chunk(chunk: int) -> None:
    ours, theirs = _numbers(), _numbers()
    found, expected = token_loss(*ours), _torchs(*theirs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (0.3 * found).backward()
    (0.3 * expected).backward()
    for a, b in zip(ours[:3], theirs[:3]):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_in_bf16_loss_and_gradients_stay_near_torchs(chunk: int) -> None:
    ours, exact = _numbers(), _numbers()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_loss(*ours)
    found.backward()
    expected = _torchs(*exact)
    expected.backward()
    assert found.dtype == torch.float32
    assert found.item() != expected.item(), "computed in fp32"
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-2)
    for a, b in zip(ours[:3], exact[:3]):
        assert a.grad is not None
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("requires", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_trained_inputs_get_a_gradient(requires: tuple[bool, bool, bool]) -> None:
    ours, theirs = _numbers(requires), _numbers(requires)
    token_loss(*ours).backward()
    _torchs(*theirs).backward()
    for a, b in zip(ours[:3], theirs[:3]):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_a_table_in_bf16_gets_a_bf16_gradient() -> None:
    numbers = [x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x for x in _numbers()]
    token_loss(*numbers).backward()
    assert [x.grad.dtype for x in numbers[:3] if x.grad is not None] == [torch.bfloat16] * 3


def test_without_gradients_the_loss_is_the_same_and_none_are_made() -> None:
    numbers = _numbers()
    with torch.no_grad(), _Allocated() as seen:
        loss = token_loss(*numbers)
    assert loss.item() == token_loss(*numbers).item()
    assert not loss.requires_grad
    assert (ROWS, HIDDEN) not in seen.shapes


def test_no_tensor_as_large_as_all_logits_is_allocated_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(likelihoods.ELEMENTS, "cpu", 4 * ROWS)
    kept: list[int] = []
    numbers = _numbers()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
        _Allocated() as seen,
    ):
        token_loss(*numbers).backward()
    assert max(seen.numel()) == max(4 * ROWS, ROWS * HIDDEN) < TARGETS * ROWS
    assert sum(kept) == TARGETS * HIDDEN + ROWS * HIDDEN + ROWS  # the gradients themselves, to be scaled
    with _Allocated() as torchs:
        _torchs(*numbers).backward()
    assert max(torchs.numel()) == TARGETS * ROWS


def test_a_second_backward_pass_is_refused() -> None:
    loss = token_loss(*_numbers())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Allocated(TorchDispatchMode):
    """Shapes of the outputs of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def numel(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in (out if isinstance(out, tuple) else (out,)) if hasattr(x, "shape")}
        return out
