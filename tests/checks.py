"""What tests of several models check, refusals in exactly one line, and cases for `make test`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cellmill.errors import ConfigError
from cellmill.train.batch_rows import compute_shares


@contextmanager
def refused(message: str, error: type[Exception] = ConfigError) -> Iterator[None]:
    """The enclosed code raises this error, with exactly this message."""
    with pytest.raises(error) as raised:
        yield
    assert str(raised.value) == message


def quick(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Values or rows of a parametrized test, of which those that are not chosen are only in `make
    test-all`.
    """
    parameters = []
    for value in values:
        row = value if isinstance(value, tuple) else (value,)
        marks = () if value in chosen else pytest.mark.full
        parameters.append(pytest.param(*row, marks=marks))
    return parameters


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5, message: Any = None
) -> None:
    """Tensors are equal up to `tolerance`, which is relative for values above 1."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=message)


def check_gradients(
    model: Any,
    loss: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> dict[str, torch.Tensor | None]:
    """Two losses have the same gradients, which are returned by name of the parameter."""
    gradients = gradients_by_name(model, loss)
    expected_gradients = gradients_by_name(model, expected)
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=atol, msg=name)
    return gradients


def gradients_by_name(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Gradients of a loss, None for parameters that it does not depend on."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_by_shares(model: Any, prepared: Sequence[Any]) -> torch.Tensor:
    """The loss of micro-batches by their shares in the table of a global batch, which has empty
    slots before and after them.
    """
    (width,) = model.objective.coupled_widths
    with torch.no_grad():
        rows = [model.objective.coupled_rows(model, model.states(part), part) for part in prepared]
    filled_slots = [part_rows for (part_rows,) in rows]
    table = torch.cat([torch.zeros(3, width), *filled_slots, torch.zeros(2, width)])
    shares = compute_shares(model.objective, [table], rows, first_row=3)
    loss = torch.zeros(())
    for part, part_shares in zip(prepared, shares):
        loss = loss + model(replace(part, shares=part_shares))
    return loss
