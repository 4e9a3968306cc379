"""gradcomp.torch as the checks of collectives call it, and the checks that only PyTorch needs, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collective_checks
import collective_refusals
import ml_dtypes
import numpy as np
import pytest
import torch
from collective_adapters import Check, Collectives, outcome, report
from without_inline import nothing_inline_among

import gradcomp.torch as gc


class TorchCollectives(Collectives):
    """gradcomp.torch, to which Horovod's names are the same functions."""

    gc = gc

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach()
        return (
            tensor.float().numpy().astype(ml_dtypes.bfloat16)
            if tensor.dtype is torch.bfloat16
            else tensor.numpy()
        )

    @contextmanager
    def raises(self, kind: type[Exception], *texts: str) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        assert all(text in str(caught.value) for text in texts), str(caught.value)

    def gradient(
        self, function: Callable[[Any], Any], array: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        x = self.tensor(array).requires_grad_()
        result = function(x)
        (result * self.tensor(weight)).sum().backward()
        return self.array(result), self.array(x.grad)


#: Checks that mean something in a world of one too, and those of several ranks.
ALONE: dict[str, Check] = dict(collective_checks.CHECKS)
CHECKS: dict[str, Check] = {**ALONE, **collective_refusals.CHECKS}


def check(function: Check) -> Check:
    ALONE[function.__name__] = function
    return check_of_several(function)


def check_of_several(function: Check) -> Check:
    """Register a check that means nothing in a world of one."""
    assert function.__name__ not in CHECKS
    CHECKS[function.__name__] = function
    return function


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)


def main() -> None:
    """Run the checks of this world in one process, and print what came of each as JSON, by name."""
    gc.init(timeout_seconds=60)
    nothing_inline_among(3, gc.size())
    ours = TorchCollectives()
    report({name: outcome(each, ours) for name, each in (ALONE if ours.world == 1 else CHECKS).items()})
