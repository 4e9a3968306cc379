"""Measures the error of many compressors on a layer: the error tables of L-GreCo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradcomp.compress import (
    DGC,
    BestRank,
    CLTk,
    Compressor,
    GlobalTopK,
    Identity,
    PowerSGD,
    SpectralAtomo,
    TopK,
)
from gradcomp.compress.base import Coded
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.compress.sparse.base import Sparse, elements_at
from gradcomp.compress.sparse.payload import narrow
from gradcomp.control.base import Doubles, Numbers
from gradcomp.control.distortion import Budget, Subject, energies, magnitudes, segment, spectra
from gradcomp.control.distortion.code_errors import code_errors
from gradcomp.control.distortion.round_trip import round_trip, round_trip_bytes
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, HostVector, Vector
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.devices import HOST, Device


def errors(
    choices: Sequence[Compressor],
    layer: LayerSpec,
    values: Floats | Vector,
    seed: int,
    *,
    memory_bytes: int | None = None,
    device: Device = HOST,
) -> Doubles:
    """Returns ||values - decompress(compress(values))||, the L2 norm (not squared), of every choice.

    The error is that of one rank's round trip, without error feedback, momentum, clipping or schedules, so that a
    wrapper has the error of the compressor inside it, and without the second coding of the mean on its way back. By
    family:

    - Coded (casts, quantisers, signs): the layer is encoded, once per choice, with draws from the seed.
    - TopK, CLTk: the norm of all but the k largest elements, for all densities at once. GlobalTopK and DGC too: as if
      the layer were the model, and as if the sample gave the exact threshold. If selected values are coded, they are
      coded for every density, and the selection is narrowed from one density to the next.
    - PowerSGD, BestRank: sqrt(sum over i > r of s_i^2), from the singular values or 5 power steps (Markov 2024,
      appendix B.2), whichever is cheaper for the shape and the largest rank; for all ranks at once. PowerSGD's first
      step has a larger error than that; with its warm start it comes as near as the power steps do.
    - SpectralAtomo: from the singular values, with draws from the seed.
    - All others: a round trip for each.

    The error of a stochastic quantiser is measured with one draw. No state is shared with training; kernels, sorting
    and LAPACK run without the interpreter's lock. Equal arguments give equal results on one machine; other machines may
    differ by rounding and LAPACK.

    Args:
        choices: any compressors, at their levels; those of a family cost less together than one by one.
        layer: its name (on which draws depend) and shape.
        values: float32, of the layer's shape or flat, or a vector; its accumulated gradient. Only read.
        seed: 64 bits.
        memory_bytes: the most memory to use besides the values (and besides a copy of them if they are not contiguous);
            None: what the fastest way takes, mostly one or two times the layer and its payload.
        device: where ``values`` lie.

    Returns:
        float64, an error per choice. 0: nothing is lost. inf: the choice cannot send the layer, because that is
        float64, or because values so large overflow in the code. All NaN if a value is not finite; 0 for no values.

    Raises:
        ConfigError: the number of values is not the layer's; or every way to measure a choice takes more memory than
            allowed: the message says how much is needed.

    Source: Markov et al. 2024, section 4, "System Implementation"; Markov 2024, appendix B.2.
    """
    if not isinstance(values, Vector):
        values = HostVector(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    assert isinstance(values, HostVector) == (device.driver is None), "the device is that of the values"
    if values.size != layer.size:
        raise ConfigError(f"layer {layer.name!r} has {layer.size} elements, got {values.size} values")
    if not np.isfinite(energies(segment(values.address, values.size), device)[0]):
        return np.full(len(choices), np.nan)
    found = np.zeros(len(choices))
    families: dict[_Measure, list[int]] = {}
    bare = [choice.bare() for choice in choices]
    for i, choice in enumerate(bare):
        if layer.dtype == "float64" and not isinstance(choice, Identity):
            found[i] = np.inf
        elif values.size and not choice.traits.exact:
            families.setdefault(_measure_of(choice), []).append(i)
    for measure, members in families.items():
        names = ", ".join(dict.fromkeys(bare[i].name for i in members))
        budget = Budget(memory_bytes, f"what {names} would lose of layer {layer.name!r}")
        found[members] = measure([bare[i] for i in members], Subject(layer, values, seed, budget, device))
    return found


_Measure = Callable[[Sequence[Any], Subject], Doubles]


def _measure_of(choice: Compressor) -> _Measure:
    """Returns the function that measures a compressor.

    Types are compared exactly, since a subclass may select or send something else.
    """
    by_block = isinstance(choice.level, tuple)  # controllers never choose these
    if isinstance(choice, Coded) and type(choice).exchange is Coded.exchange and not by_block:
        return code_errors
    measure = _MEASURES.get(type(choice), _by_round_trip)
    coded = measure is _by_magnitude and isinstance(choice, Sparse) and not choice.values.traits.exact
    return _by_coded_magnitude if coded else measure


def _by_magnitude(choices: Sequence[TopK | DGC | GlobalTopK | CLTk], subject: Subject) -> Doubles:
    return magnitudes.rest_norms(subject.values, _counts(choices, subject), subject.budget)


def _by_coded_magnitude(choices: Sequence[TopK | DGC | GlobalTopK], subject: Subject) -> Doubles:
    counts = _counts(choices, subject)
    most = int(counts.max())
    # Memory holds the rest, and two selections while one is narrowed from the other.
    subject.budget.require(4 * subject.layer.size + 24 * most)
    found = magnitudes.rest_norms(subject.values, counts, subject.budget)
    chosen = magnitudes.largest_of(subject.values, most, np.empty_like(subject.values))
    for i in np.argsort(-counts, kind="stable").tolist():
        chosen = narrow(chosen, counts[i : i + 1])
        selected = LayerSpec(subject.layer.name, (len(chosen.values),))
        coded = replace(subject, layer=selected, flat=HostVector(chosen.values), device=HOST)
        found[i] = np.hypot(found[i], code_errors([choices[i].values], coded)[0])
    return found


def _counts(choices: Sequence[TopK | DGC | GlobalTopK | CLTk], subject: Subject) -> Numbers:
    """Returns the number of elements that each choice selects."""
    densities = np.array([choice.density for choice in choices], dtype=np.float64)
    return elements_at(densities, np.full(len(choices), subject.layer.size))


def _by_rank(choices: Sequence[PowerSGD | BestRank], subject: Subject) -> Doubles:
    ranks, found = _ranks(choices, subject), np.zeros(len(choices))
    if ranks.any():
        matrix = subject.values.reshape(matrix_shape(subject.layer.shape))
        drawn = {"seed": subject.seed, "layer": subject.layer.hash}
        found[ranks > 0] = spectra.rest_norms(matrix, ranks[ranks > 0], subject.budget, **drawn)
    return found


def _by_atoms(choices: Sequence[SpectralAtomo], subject: Subject) -> Doubles:
    ranks, found = _ranks(choices, subject), np.zeros(len(choices))
    if ranks.any():
        matrix = subject.values.reshape(matrix_shape(subject.layer.shape))
        subject.budget.require(spectra.product_bytes(matrix.shape))
        sigma = np.sqrt(spectra.squared_singular_values(matrix)[::-1])
        hashes, draw = np.array([subject.layer.hash], np.uint32), Draw(subject.seed, 0, 0)
        for i in np.flatnonzero(ranks).tolist():
            chosen, weights = choices[i].choose(sigma[None], int(ranks[i]), hashes, draw)
            found[i] = np.linalg.norm(sigma - np.where(chosen, weights, 0.0)[0])
    return found


def _ranks(choices: Sequence[PowerSGD | BestRank | SpectralAtomo], subject: Subject) -> Numbers:
    """Returns the rank of each choice, 0 if it sends the layer exactly."""
    return np.array([clamped_rank(subject.layer.shape, choice.rank) for choice in choices], dtype=np.int64)


def _by_round_trip(choices: Sequence[Compressor], subject: Subject) -> Doubles:
    subject.budget.require(max(round_trip_bytes(choice, subject.layer) for choice in choices))
    return np.array([_lost_on_the_way(choice, subject) for choice in choices])


def _lost_on_the_way(choice: Compressor, subject: Subject) -> float:
    given = round_trip(choice, subject.layer, subject.values, subject.seed)
    if given is None:
        return np.inf
    np.subtract(subject.values, given, out=given)
    return float(np.sqrt(energies(segment(given.ctypes.data, given.size))[0]))


_MEASURES: dict[type[Compressor], _Measure] = {
    **dict.fromkeys((TopK, CLTk, DGC, GlobalTopK), _by_magnitude),
    **dict.fromkeys((PowerSGD, BestRank), _by_rank),
    SpectralAtomo: _by_atoms,
}
