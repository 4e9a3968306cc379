"""Checks that momentum acts exactly once: in the optimizer, or before compression."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Policy
from gradcomp.compress.base import OPTIMIZER
from gradcomp.core.errors import ConfigError
from gradcomp.exchange.pipeline import Pipeline

logger = logging.getLogger("gradcomp")

Numbers = npt.NDArray[np.int64]

_TWICE = """\
momentum acts twice on layer {layer!r}: {compressor} accumulates it before compression, and {optimizer} has a momentum \
of {momentum:g}, which acts on the mean again, so that steps are far too long. Either give the optimizer none: \
momentum=0, and cycle_momentum=False to a scheduler such as OneCycleLR, which sets it at every step. Or let \
compression take the optimizer's, which then steps without: momentum_factor="optimizer" of dgc and lgc, \
factor="optimizer" of momentum_correction; signum takes momentum=0"""

_LOST = """\
layer {layer!r} would lose its momentum: compression takes over the momentum of other layers of its parameter group, \
so {optimizer} steps that group without momentum, and nothing takes over this layer's. Give it a parameter group \
of its own"""

_AVERAGES = """\
%s applies momentum before compression, and %s averages the mean once more. Known to work under such an optimizer is \
compression without momentum: quantisers and PowerSGD, or topk and dgc with momentum_factor=0, which lose more"""


#: Why an optimizer's momentum cannot act before compression.
LOOKS_AHEAD = (
    "nesterov=True looks ahead of the mean, which momentum before compression cannot: give nesterov=False"
)
NO_SUM = "%s does not add up gradients as %s does, whose momentum it is: give the factor as a number"


@dataclass(frozen=True)
class Group:
    """Describes parameters that an optimizer treats in the same way.

    ``problem`` says why the optimizer's momentum cannot act before compression; empty if it can.
    """

    optimizer: str
    momentum: float
    problem: str = ""


def momenta(
    pipeline: Pipeline, groups: Sequence[Group], group_of: Numbers
) -> tuple[npt.NDArray[np.float64] | None, list[int]]:
    """Return the optimizer's momentum of each layer in the coming step, and the groups that must step without it.

    ``group_of`` has the number of each layer's group, -1 for a layer in none. The result is None and no group where
    nothing has momentum before compression. Raises ConfigError for a layer on which both have momentum, for one that
    would be left without, and for an optimizer whose momentum cannot be taken over.
    """
    before = pipeline.momenta
    if not before.any():
        return None, []
    after = np.array([*(group.momentum for group in groups), 0.0])[group_of]
    for layer in np.flatnonzero((before > 0) & (after > 0)).tolist():
        group = groups[group_of[layer]]
        raise ConfigError(
            _TWICE.format(
                layer=pipeline.layers[layer].name,
                compressor=pipeline.laid_out_plan.by_layer[pipeline.layers[layer].name].compressor,
                optimizer=group.optimizer,
                momentum=group.momentum,
            )
        )
    taken = np.isnan(before)
    without = [number for number in np.unique(group_of[taken]).tolist() if number >= 0]
    for number in without:
        if groups[number].problem:
            raise ConfigError(f'a momentum factor of "{OPTIMIZER}": {groups[number].problem}')
    for layer in np.flatnonzero(~taken & (after > 0) & np.isin(group_of, without)).tolist():
        raise ConfigError(
            _LOST.format(layer=pipeline.layers[layer].name, optimizer=groups[group_of[layer]].optimizer)
        )
    return after, without


def warn_of_averages(policy: Policy, optimizer: str) -> None:
    """Warn if compression adds up gradients under an optimizer that averages them, as Adam does."""
    if twice := [c for c in policy.compressors if c.traits.momentum]:
        logger.warning(_AVERAGES, twice[0].to_string(), optimizer)


def takes_momentum(policy: Policy) -> bool:
    """Return whether some compressor takes over the optimizer's momentum."""
    return any(c.traits.momentum == OPTIMIZER for c in policy.compressors)
