"""A pipeline's state as plain values: out, in, and over to a pipeline with more layers."""

from __future__ import annotations

from gradcomp.pipeline.pipeline import Pipeline


def inherit(new: Pipeline, old: Pipeline) -> None:
    """Give ``new``, which has all of ``old``'s layers and more, the step and the residuals of ``old``."""
    rows = {layer.name: i for i, layer in enumerate(new.layers)}
    new.step = old.step
    old.residuals.own((), old.transport.size)  # everything into first residuals
    sizes = [0] * len(new.layers)
    for i, layer in enumerate(old.layers):
        sizes[rows[layer.name]] = int(old.residuals.first.lengths[i])
    new.residuals.grow(sizes)
    for i, layer in enumerate(old.layers):
        if old.residuals.first.lengths[i]:
            new.residuals.first.value(rows[layer.name])[:] = old.residuals.first.value(i)
