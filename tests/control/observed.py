"""What a controller sees, built by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp import Compressor, LayerSpec, Quantize
from gradcomp.control import Environment, Periodic, PeriodObservations
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology


def environment(sizes: Sequence[int], own: Compressor | None = None, world: int = 2) -> Environment:
    """Layers of these sizes, matrices where the size allows one, all under one compressor, 4 bits by default."""
    layers = [
        LayerSpec(f"l{i}", (size // 8, 8) if size % 8 == 0 else (size,)) for i, size in enumerate(sizes)
    ]
    return environment_of(layers, [own or Quantize(4, 64)] * len(sizes), world)


def environment_of(
    layers: Sequence[LayerSpec], compressors: Sequence[Compressor | None], world: int = 2
) -> Environment:
    return Environment(layers, compressors, 0, Topology.one_host(world), Scheme("sra"))


def seen_by(
    controller: Periodic,
    sizes: Sequence[int],
    norm: Sequence[float],
    *,
    mean: Sequence[float] | None = None,
    deviation: Sequence[float] | None = None,
    current: Sequence[int] | None = None,
    memory: Sequence[float] | None = None,
    errors: np.ndarray | None = None,
    own: Compressor | None = None,
    world: int = 2,
) -> PeriodObservations:
    """The first decision's, unless ``memory`` and ``current`` say otherwise.

    Errors by default: norm / 2^level.
    """
    candidates = controller.candidate_levels(environment(sizes, own, world))
    rows = len(candidates.layers)
    norm = np.array(norm, dtype=np.float64)
    if errors is None:
        errors = np.full(candidates.costs.shape, np.inf)
        for row, choices in enumerate(candidates.choices):
            errors[row, : len(choices)] = [norm[row] * 2.0 ** -float(c.level) for c in choices]
    return PeriodObservations(
        100,
        candidates,
        norm,
        np.zeros(rows) if mean is None else np.array(mean, dtype=np.float64),
        np.ones(rows) if deviation is None else np.array(deviation, dtype=np.float64),
        errors if controller.needs_errors else None,
        np.zeros(rows),
        np.zeros(rows),
        np.zeros(rows, dtype=np.int64),
        candidates.reference.copy() if current is None else np.array(current, dtype=np.int64),
        controller.begin_memory(candidates) if memory is None else np.array(memory, dtype=np.float64),
    )


def chosen(observed: PeriodObservations, choices) -> list:
    """The levels that a decision comes to."""
    return [
        options[k].level for options, k in zip(observed.candidates.choices, choices.tolist(), strict=True)
    ]
