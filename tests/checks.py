"""What tests of several models check, refusals in exactly one line, and cases for `make test`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cellmill.errors import ConfigError
from cellmill.train.batch_rows import shares_of


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
    rows = [(value if isinstance(value, tuple) else (value,), value in chosen) for value in values]
    return [
        pytest.param(*row, marks=() if is_quick else pytest.mark.full) for row, is_quick in rows
    ]


def check_gradients(
    model: Any,
    loss: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> dict[str, torch.Tensor | None]:
    """A loss has the gradients of another one, which are returned by name."""
    gradients = []
    for one in (loss, expected):
        model.zero_grad()
        one.backward()  # type: ignore[no-untyped-call]
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=rtol, atol=atol, msg=name)
    return gradients[0]


def loss_by_shares(model: Any, prepared: Sequence[Any]) -> torch.Tensor:
    """The loss of micro-batches by their shares in the table of a global batch, which has empty
    slots around them.
    """
    (width,) = model.objective.row_widths
    with torch.no_grad():
        rows = [model.objective.rows(model, model.states(part), part) for part in prepared]
    table = torch.cat([torch.zeros(3, width), *(own for (own,) in rows), torch.zeros(2, width)])
    shares = shares_of(model.objective, [table], rows, first=3)
    return torch.stack(
        [model(replace(part, shares=own)) for part, own in zip(prepared, shares)]
    ).sum()
