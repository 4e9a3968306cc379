"""Published methods of local steps under Keras, as settings of ``LocalSteps``: ``DiLoCo`` and ``SparseLoCo``."""

from __future__ import annotations

from typing import Any

import keras

from gradcomp.compress.policy import sparseloco
from gradcomp.tf.local_steps import LocalSteps


def DiLoCo(
    every: int = 30, *, outer_lr: float = 0.7, outer_momentum: float = 0.9, **others: Any
) -> LocalSteps:
    """Return a callback of local steps whose outer optimizer is SGD with Nesterov momentum.

        v <- m v - lr D;  anchor <- anchor + m v - lr D;  theta_r <- anchor

    D is the mean over ranks of anchor - theta_r. ``others`` are arguments of :class:`LocalSteps`.
    Wire: uncompressed, 2 d (N-1)/N bytes a rank for d bytes, once in ``every`` batches.
    Source: Douillard et al. 2023, with lr = 0.7 and m = 0.9.
    """
    outer = keras.optimizers.SGD(outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    return LocalSteps(every, outer, **others)


def SparseLoCo(
    every: int = 15,
    *,
    density: float = 0.02,
    bits: int = 2,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    **others: Any,
) -> LocalSteps:
    """Return a callback of local steps with the compression of :func:`gradcomp.torch.SparseLoCo`.

        e <- d e + (anchor - theta_r);  S_r = Q(TopK of each chunk of e);  e <- e - S_r
        anchor <- anchor - lr mean(S_r);  theta_r <- anchor

    ``others`` are arguments of :class:`LocalSteps`. Wire: about 0.21 bits an element at a density of 2% and 2 bits,
    which a rank sends to all others, once in ``every`` batches. State: a residual for each weight.
    Source: Sarfi et al. 2025; it differs as under PyTorch.
    """
    compression = sparseloco(density, bits, chunk, decay)
    return LocalSteps(every, keras.optimizers.SGD(outer_lr), compression, **others)
