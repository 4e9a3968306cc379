"""Measures the error of many compressors on a layer: the error tables of L-GreCo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded, Compressor
from gradcomp.compress.identity import Identity
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.compress.lowrank.powersgd import PowerSGD
from gradcomp.compress.lowrank.spectral import BestRank, SpectralAtomo
from gradcomp.compress.sparse.base import Sparse, elements_at
from gradcomp.compress.sparse.clt_k import CLTk
from gradcomp.compress.sparse.dgc import DGC
from gradcomp.compress.sparse.payload import narrow
from gradcomp.compress.sparse.topk import GlobalTopK, TopK
from gradcomp.control.distortion import magnitudes, spectra
from gradcomp.control.distortion.budget import Budget
from gradcomp.control.distortion.code_errors import code_errors
from gradcomp.control.distortion.round_trip import round_trip, round_trip_bytes
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, HostVector, Vector
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Draw, Sizes
from gradcomp.kernels.segments import FLOAT32, SEGMENT

Doubles = npt.NDArray[np.float64]


def errors(
    choices: Sequence[Compressor],
    layer: LayerSpec,
    values: Floats | Vector,
    seed: int,
    *,
    memory_bytes: int | None = None,
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

    Returns:
        float64, an error per choice. 0: nothing is lost. inf: the choice cannot send the layer, because that is
        float64, or because values so large overflow in the code. All NaN if a value is not finite; 0 for no values.

    Raises:
        ConfigError: the number of values is not the layer's; or every way to measure a choice takes more memory than
            allowed: the message says how much is needed.

    Source: Markov et al. 2024, section 4, "System Implementation"; Markov 2024, appendix B.2.
    """
    flat = values if isinstance(values, Vector) else _held(values)
    if flat.size != layer.size:
        raise ConfigError(f"layer {layer.name!r} has {layer.size} elements, got {flat.size} values")
    if not np.isfinite(_energy(flat)):
        return np.full(len(choices), np.nan)
    found = np.zeros(len(choices))
    families: dict[_Measure, list[int]] = {}
    bare = [choice.bare() for choice in choices]
    for i, choice in enumerate(bare):
        if layer.dtype == "float64" and not isinstance(choice, Identity):
            found[i] = np.inf
        elif flat.size and not choice.traits.exact:
            families.setdefault(_measure_of(choice), []).append(i)
    for measure, members in families.items():
        names = ", ".join(dict.fromkeys(bare[i].name for i in members))
        budget = Budget(memory_bytes, f"what {names} would lose of layer {layer.name!r}")
        subject = _Subject(layer, flat, seed, budget)
        found[members] = measure([bare[i] for i in members], subject)
    return found


@dataclass(frozen=True, eq=False)
class _Subject:
    layer: LayerSpec
    flat: Vector  # in host or device memory
    seed: int
    budget: Budget

    @cached_property
    def values(self) -> Floats:
        """Returns the values in host memory, whose kernels measure most families."""
        return self.flat.read()


_Measure = Callable[[Sequence[Any], _Subject], Doubles]


def _measure_of(choice: Compressor) -> _Measure:
    """Returns the function that measures a compressor.

    Types are compared exactly, since a subclass may select or send something else.
    """
    by_block = isinstance(choice.level, tuple)  # controllers never choose these
    if isinstance(choice, Coded) and type(choice).exchange is Coded.exchange and not by_block:
        return _by_code
    measure = _MEASURES.get(type(choice), _by_round_trip)
    coded = measure is _by_magnitude and isinstance(choice, Sparse) and not choice.values.traits.exact
    return _by_coded_magnitude if coded else measure


def _by_code(choices: Sequence[Coded], subject: _Subject) -> Doubles:
    return code_errors(choices, subject.layer, subject.flat, subject.seed, subject.budget)


def _by_magnitude(choices: Sequence[TopK | DGC | GlobalTopK | CLTk], subject: _Subject) -> Doubles:
    return magnitudes.rest_norms(subject.values, _counts(choices, subject), subject.budget)


def _by_coded_magnitude(choices: Sequence[TopK | DGC | GlobalTopK], subject: _Subject) -> Doubles:
    counts, name = _counts(choices, subject), subject.layer.name
    most = int(counts.max())
    # Memory holds the rest, and two selections while one is narrowed from the other.
    subject.budget.require(4 * subject.layer.size + 24 * most)
    found = magnitudes.rest_norms(subject.values, counts, subject.budget)
    chosen = magnitudes.largest_of(subject.values, most, np.empty_like(subject.values))
    for i in np.argsort(-counts, kind="stable").tolist():
        chosen = narrow(chosen, counts[i : i + 1])
        selected = LayerSpec(name, (len(chosen.values),))
        lost = code_errors(
            [choices[i].values], selected, HostVector(chosen.values), subject.seed, subject.budget
        )
        found[i] = np.hypot(found[i], lost[0])
    return found


def _counts(choices: Sequence[TopK | DGC | GlobalTopK | CLTk], subject: _Subject) -> Sizes:
    """Returns the number of elements that each choice selects."""
    densities = np.array([choice.density for choice in choices], dtype=np.float64)
    return elements_at(densities, np.full(len(choices), subject.layer.size))


def _by_rank(choices: Sequence[PowerSGD | BestRank], subject: _Subject) -> Doubles:
    ranks = _ranks(choices, subject)
    found = np.zeros(len(choices))
    if ranks.any():
        matrix = subject.values.reshape(matrix_shape(subject.layer.shape))
        drawn = {"seed": subject.seed, "layer": subject.layer.hash}
        found[ranks > 0] = spectra.rest_norms(matrix, ranks[ranks > 0], subject.budget, **drawn)
    return found


def _by_atoms(choices: Sequence[SpectralAtomo], subject: _Subject) -> Doubles:
    ranks = _ranks(choices, subject)
    found = np.zeros(len(choices))
    if ranks.any():
        matrix = subject.values.reshape(matrix_shape(subject.layer.shape))
        subject.budget.require(spectra.product_bytes(matrix.shape))
        sigma = np.sqrt(spectra.squared_singular_values(matrix)[::-1])
        hashes, draw = np.array([subject.layer.hash], np.uint32), Draw(subject.seed, 0, 0)
        for i, (choice, rank) in enumerate(zip(choices, ranks.tolist(), strict=True)):
            if not rank:
                continue
            chosen, weights = choice.choose(sigma[None], rank, hashes, draw)
            found[i] = np.linalg.norm(sigma - np.where(chosen, weights, 0.0)[0])
    return found


def _ranks(
    choices: Sequence[PowerSGD | BestRank | SpectralAtomo], subject: _Subject
) -> npt.NDArray[np.int64]:
    """Returns the rank of each choice, 0 if it sends the layer exactly."""
    return np.array([clamped_rank(subject.layer.shape, choice.rank) for choice in choices], dtype=np.int64)


def _by_round_trip(choices: Sequence[Compressor], subject: _Subject) -> Doubles:
    subject.budget.require(max(round_trip_bytes(choice, subject.layer) for choice in choices))
    return np.array([_lost_on_the_way(choice, subject) for choice in choices])


def _lost_on_the_way(choice: Compressor, subject: _Subject) -> float:
    given = round_trip(choice, subject.layer, subject.values, subject.seed)
    if given is None:
        return np.inf
    np.subtract(subject.values, given, out=given)
    return float(np.sqrt(_energy(HostVector(given))))


_MEASURES: dict[type[Compressor], _Measure] = {
    TopK: _by_magnitude,
    CLTk: _by_magnitude,
    DGC: _by_magnitude,
    GlobalTopK: _by_magnitude,
    PowerSGD: _by_rank,
    BestRank: _by_rank,
    SpectralAtomo: _by_atoms,
}


def _held(values: Floats) -> Vector:
    return HostVector(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))


def _energy(values: Vector) -> float:
    """Returns the sum of squares in float64, which is finite if all values are."""
    table, found = np.zeros(1, dtype=SEGMENT), np.empty(1)
    table["gradient"], table["length"], table["dtype"] = values.address, values.size, FLOAT32
    selection.squares(table, found)
    return float(found[0])
