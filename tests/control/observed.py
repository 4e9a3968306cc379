"""What a controller sees, built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradcomp import Compressor, LayerSpec, Quantize
from gradcomp.control import Environment, Periodic, PeriodObservations
from gradcomp.control.candidates import CandidateLevels
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.testing.simulation import Simulation


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


def observations(controller: Periodic, candidates: CandidateLevels, **given: Any) -> PeriodObservations:
    """The first decision's, of layers whose norm is 1; some of them may be ``given``."""
    rows = len(candidates.layers)
    about = {
        "step": 100,
        "candidates": candidates,
        **dict.fromkeys(("norm", "deviation"), np.ones(rows)),
        **dict.fromkeys(("mean", "wire", "sent"), np.zeros(rows)),
        "errors": None,
        "position": np.arange(rows),
        "current": candidates.reference.copy(),
        "memory": controller.begin_memory(candidates),
    }
    return PeriodObservations(**{**about, **given})


def seen_by(
    controller: Periodic,
    sizes: Sequence[int],
    norm: Sequence[float],
    *,
    errors: np.ndarray | None = None,
    own: Compressor | None = None,
    world: int = 2,
    **given: Sequence[float] | None,
) -> PeriodObservations:
    """Observations of layers of these sizes; errors are by default norm / 2^level."""
    candidates = controller.candidate_levels(environment(sizes, own, world))
    if errors is None:
        errors = np.full(candidates.costs.shape, np.inf)
        for row, choices in enumerate(candidates.choices):
            errors[row, : len(choices)] = [norm[row] * 2.0 ** -float(c.level) for c in choices]
    arrays = {
        name: np.array(value, dtype=np.int64 if name == "current" else np.float64)
        for name, value in {"norm": norm, **given}.items()
        if value is not None
    }
    return observations(controller, candidates, errors=errors if controller.needs_errors else None, **arrays)


def shared(
    ranks: Simulation, draw: Callable[[int], Any] | None = None, steps: int = 20
) -> tuple[PeriodObservations, list[Any]]:
    """What ranks decide from first, the same on all of them, and the gradients of the steps until then."""
    drawn = []
    for step in range(steps):
        drawn.append(ranks.gradients() if draw is None else draw(step))
        ranks.step(drawn[-1])
        found = [p.controller.observations for p in ranks.pipelines]
        if found[0] is not None:
            assert len({one.errors.tobytes() for one in found}) == 1
            return found[0], drawn
    raise AssertionError("nothing was shared")


def chosen(observed: PeriodObservations, choices) -> list:
    """The levels that a decision comes to."""
    return [
        options[k].level for options, k in zip(observed.candidates.choices, choices.tolist(), strict=True)
    ]
