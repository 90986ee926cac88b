"""Matrix products through oneDNN equal torch's, with their gradients."""

import pytest
import torch
from torch import nn

from cellmill.parallel import cpu_matmul
from cellmill.parallel.cpu_matmul import Linear, product

COUNTS = [1, 33]


@pytest.fixture(autouse=True, params=[0, 1 << 40], ids=["oneDNN", "torch's own"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "LARGE", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_is_torchs_for_transposed_operands_too(dtype: torch.dtype) -> None:
    a, b = torch.randn(9, 33).to(dtype), torch.randn(17, 33).to(dtype)
    torch.testing.assert_close(product(a, b), a @ b.t())
    torch.testing.assert_close(product(a.t(), a.t()), a.t() @ a)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients_are_torchs(count: int, bias: bool) -> None:
    ours, theirs = Linear(24, 40, bias), nn.Linear(24, 40, bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(count, 24)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(x) for layer, x in zip((ours, theirs), inputs)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=2e-5, rtol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-5)


def test_a_frozen_layer_passes_gradients_on_and_gets_none() -> None:
    layer, x = Linear(8, 8).requires_grad_(False), torch.randn(5, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_under_autocast_a_linear_layer_is_in_bf16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(8, 8)(torch.randn(5, 8)).dtype == torch.bfloat16
