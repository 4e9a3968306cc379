"""Published methods of local steps, as settings of ``LocalSteps``: ``DiLoCo`` and ``SparseLoCo``."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.compress.policy import sparseloco
from gradcomp.torch.local_steps import LocalSteps


def DiLoCo(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    every: int = 30,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    **others: Any,
) -> LocalSteps:
    """Return local steps whose outer optimizer is SGD with Nesterov momentum.

        D = mean over ranks of (anchor - theta_r)
        v <- m v + D;  anchor <- anchor - lr (D + m v);  theta_r <- anchor

    ``others`` are arguments of :class:`LocalSteps`, such as ``compression="quantize:bits=4,feedback=true"``,
    ``fragments`` and ``delay`` (Streaming DiLoCo).
    Wire: uncompressed, 2 d (N-1)/N bytes a rank for d bytes, once in ``every`` steps.
    Source: Douillard et al. 2023, with lr = 0.7 and m = 0.9.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    outer = torch.optim.SGD(parameters, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    return LocalSteps(model, inner_optimizer, every, outer, **others)


def SparseLoCo(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    every: int = 15,
    *,
    density: float = 0.02,
    bits: int = 2,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    **others: Any,
) -> LocalSteps:
    """Return local steps that exchange the largest elements of chunks, with a decaying error feedback and no momentum.

        e <- d e + (anchor - theta_r);  S_r = Q(TopK of each chunk of e);  e <- e - S_r
        anchor <- anchor - lr mean(S_r);  theta_r <- anchor

    The mean is over all N ranks: an element that a rank did not send counts as 0. All parameters are compressed, biases
    and norms too. Q rounds to the nearest of 2^``bits`` even levels between the least and the greatest of 64 selected
    values; with one bit, to the mean of the values of either sign. ``others`` are arguments of :class:`LocalSteps`.
    Wire: a density of 2% at 2 bits costs about 0.21 bits an element, which a rank sends to all others, once in
    ``every`` steps. State: a residual for each parameter.
    Source: Sarfi et al. 2025 (SparseLoCo); d = 0.95 and lr = 1. Differs: Q, where the released code has
    four bins in units of the standard deviation; the released code divides an element by the number of ranks that sent
    it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    outer = torch.optim.SGD(parameters, lr=outer_lr)
    return LocalSteps(model, inner_optimizer, every, outer, sparseloco(density, bits, chunk, decay), **others)
