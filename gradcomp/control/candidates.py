"""The candidates of each layer, the bytes of each, and ranges of levels that are too short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from gradcomp.compress import Compressor, PowerSGD, Quantize, TopK, from_string
from gradcomp.compress.blocks import borders, count_for, unit_of
from gradcomp.compress.checks import is_number
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.lowrank.base import LowRank, clamped_rank
from gradcomp.compress.messages import Broadcast, Reduce, Sum
from gradcomp.control.base import Doubles, Environment, Mask, Numbers
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.scheme import AUTO, Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Draw, Group
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.costs import cost
from gradcomp.reduce.model import Load

#: A level of the layer's own compressor, or a compressor of any family.
Candidate: TypeAlias = "Level | Compressor | str"
#: The type of the argument ``levels=``: candidates, or :data:`HYBRID`.
Candidates: TypeAlias = "Sequence[Candidate] | str"
#: The candidates of all layers, or a function that returns those of one; None stands for the default ranges.
CandidatesByLayer: TypeAlias = "Candidates | Callable[[LayerSpec, Compressor], Candidates] | None"

#: Names thirteen levels of three families, which differ between convolutions and matrices, as in the benchmarks.
HYBRID = "hybrid"
_HYBRID_BITS = (2, 3, 4, 6, 8)
_HYBRID_CONVOLUTIONS = ((0.005, 0.01, 0.02, 0.05), (1, 2, 4, 8))
_HYBRID_MATRICES = ((0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64))

#: A range is too short if more than this fraction of a family's elements is at one end of it.
MOST = 0.5


def sent_bytes(group: Group, scheme: Scheme, topology: Topology) -> Doubles:
    """Returns the bytes that one rank sends for each segment in one step: the mean over ranks, without headers.

    Sums and codes of d bytes take what the reduction's formula says, 2 d (N-1)/N for most. Gathered payloads take
    d (N-1), where d is the upper bound if its size depends on the data. One rank's
    broadcast takes d (N-1)/N.
    """
    world = topology.world
    payload = group.compressor.wire_bytes(group).astype(np.float64)
    first = next(group.compressor.exchange(group, StepContext(Draw(0, 0, 0), world)))
    sent: Doubles = payload * (world - 1)
    if isinstance(first, Reduce):
        scheme = Scheme("sra") if scheme.name == AUTO else scheme
        # The cost is linear in both, so the cost of one byte of each is enough.
        costs = (cost(scheme, Load(*unit), topology) for unit in ((1.0, 0.0), (0.0, 1.0)))
        of_payload, of_dense = (float(one.bytes_sent().mean()) for one in costs)
        sent = of_payload * payload + of_dense * 4.0 * first.group.table["length"]
    elif isinstance(first, Broadcast):
        traffic = group.compressor.traffic(group)
        sent = (traffic.led + traffic.gathered * world + 2.0 * traffic.summed) * ((world - 1) / world)
    elif isinstance(first, Sum):
        sent = 2.0 * payload * ((world - 1) / world)
    return sent


def bytes_of_choices(
    choices: Sequence[Compressor], layer: LayerSpec, scheme: Scheme, topology: Topology
) -> Doubles:
    """Returns the bytes of :func:`sent_bytes` for one layer under each choice."""
    found = np.zeros(len(choices))
    for members, group in _families(choices, layer):
        # Counting sums the blocks of a layer.
        found[members] = np.bincount(group.layers, sent_bytes(group, scheme, topology))
    return found


def _families(choices: Sequence[Compressor], layer: LayerSpec) -> Iterator[tuple[list[int], Group]]:
    """Yields, by family, the indices of its choices and a group with one copy of the layer for each of them."""
    families: dict[str, list[int]] = {}
    for k, choice in enumerate(choices):
        families.setdefault(choice.family_string(), []).append(k)
    for members in families.values():
        pieces = [Piece(row, 0, layer.size) for row in range(len(members))]
        yield members, group_of(pieces, [layer] * len(members), [choices[k] for k in members])


def _leaves_zeros(choice: Compressor) -> TypeGuard[TopK]:
    """Returns true for TopK without zeros, whose payload has no more values than the gradient has nonzero elements.

    Compressors that select by a threshold, or what another rank selected, also leave elements out, but how many of a
    gradient's elements these are is not known.
    """
    return isinstance(choice, TopK) and not choice.zeros


def layer_bytes(compressor: Compressor, layer: LayerSpec, scheme: Scheme, topology: Topology) -> float:
    """Returns the bytes of :func:`sent_bytes` for one layer under one choice."""
    return float(bytes_of_choices([compressor], layer, scheme, topology)[0])


@dataclass(frozen=True, eq=False)
class CandidateLevels:
    """The choices of every controlled layer: ``choices[i]`` of layer number ``layers[i]``.

    ``costs[i, k]``: bytes per step and rank, inf where there is no choice k. ``reference[i]``: the choice that the user
    asked for. A row is a layer, or a block of its rows; ``specs[i]`` of a block is a vector with the layer's name,
    which begins at element ``starts[i]`` of the layer. The blocks of a layer are consecutive and in order.
    """

    layers: Numbers
    specs: tuple[LayerSpec, ...]
    choices: tuple[tuple[Compressor, ...], ...]
    costs: Doubles
    reference: Numbers
    starts: Numbers
    _ranges: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict, init=False)

    @cached_property
    def items(self) -> dict[int, range]:
        """Maps layer numbers to the layer's rows."""
        firsts = np.flatnonzero(np.diff(self.layers, prepend=-1)).tolist()
        return {int(self.layers[at]): range(at, end) for at, end in pairwise([*firsts, len(self.layers)])}

    @cached_property
    def layer_of(self) -> Numbers:
        """Returns by row the index of its layer among the controlled layers, from 0."""
        found: Numbers = np.cumsum(np.diff(self.layers, prepend=self.layers[:1]) != 0)
        return found

    def chosen(self, current: Numbers) -> dict[int, Compressor]:
        """Maps layer numbers to the compressor that the rows' choices make; equal levels of blocks become one level."""
        found: dict[int, Compressor] = {}
        for layer, rows in self.items.items():
            first, *rest = (self.choices[row][current[row]] for row in rows)
            levels = (first.level, *(choice.level for choice in rest))
            found[layer] = first if len(set(levels)) == 1 else first.with_level(levels)
        return found

    @property
    def width(self) -> int:
        """Returns the largest number of choices of a layer."""
        return int(self.costs.shape[1])

    @cached_property
    def leaves_zeros(self) -> Mask:
        """Returns a mask of the rows that have a choice which sends none of the zeros."""
        return np.array([any(map(_leaves_zeros, choices)) for choices in self.choices], dtype=np.bool_)

    def expected_costs(self, nonzero: Doubles) -> Doubles:
        """Returns ``costs`` for gradients with ``nonzero`` nonzero elements on average, by row.

        TopK sends at most that many of its k elements.
        """
        costs = self.costs.copy()
        for row in np.flatnonzero(self.leaves_zeros).tolist():
            for members, group in _families(self.choices[row], self.specs[row]):
                if _leaves_zeros(family := group.compressor):
                    form = family.format(group.table)
                    counts = np.minimum(form.limits, round(float(nonzero[row])))
                    # One factor serves all choices, so that those which send the same cost exactly the same.
                    factor = costs[row, members[0]] / form.wire_bytes(form.limits)[0]
                    costs[row, members] = factor * form.wire_bytes(counts)
        return costs

    def find(self, row: int, family: str, level: Level) -> int | None:
        """Returns the index of the row's choice with this name and level, or None if there is none.

        A level by block counts only if it has as many levels as the layer has rows; the row's own is then looked up.
        """
        if isinstance(level, tuple):
            rows = self.items[int(self.layers[row])]
            level = level[row - rows.start] if len(level) == len(rows) else None
        for k, choice in enumerate(self.choices[row]):
            if choice.family_string() == family and choice.level == level:
                return k
        return None

    def bytes_of(self, row: int) -> Doubles:
        """Returns the bytes of every choice of a row; those of its payload if nothing is sent, as in a world of one."""
        choices, spec = self.choices[row], self.specs[row]
        costs = self.costs[row, : len(choices)]
        if costs.any():
            return costs
        groups = (group_of([Piece(0, 0, spec.size)], [spec], [choice]) for choice in choices)
        return np.array([float(group.compressor.wire_bytes(group).sum()) for group in groups])

    def level_range(self, row: int, family: str) -> tuple[float, float]:
        """Returns the lowest and highest level of a family, or (0, 0) if the row has none; known for equal rows."""
        key = (id(self.choices[row]), family)
        if key not in self._ranges:
            levels = (choice.level for choice in self.choices[row] if _family(choice) == family)
            numbers = [float(level) for level in levels if isinstance(level, int | float)]
            self._ranges[key] = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
        return self._ranges[key]


def make_candidates(
    environment: Environment, candidates: CandidatesByLayer, *, wide: bool = False, blocks: int = 1
) -> CandidateLevels:
    """Returns the choices of every layer: ``candidates``, or what that returns for the layer, or a default range.

    Default ranges are those of Markov et al. 2024, section 5.1: [D/2, 2 D] in steps of 1 for bits and ranks,
    [D/10, 10 D] in steps of D/10 for densities, as far as they are possible; see :func:`default_levels` for ``wide``
    ranges and for compressors without a level. The layer's own compressor is always one of its choices. A layer is
    divided into at most ``blocks`` blocks of rows, see :mod:`gradcomp.compress.blocks`, if its choices are levels of
    one compressor that has levels by block. Raises ConfigError for a candidate that no layer can take, an empty list,
    levels that do not include the layer's own between them, or compressors that already have levels by block.
    """
    items: list[tuple[int, LayerSpec, tuple[Compressor, ...], Doubles, int, int]] = []
    # Layers of one shape have the same choices, borders and costs.
    known: dict[object, tuple[tuple[Compressor, ...], list[int], dict[int, Doubles]]] = {}
    for number, (layer, own) in enumerate(zip(environment.layers, environment.compressors, strict=True)):
        if own is None:
            continue
        key = (layer.shape, layer.dtype, own)
        if key not in known:
            choices = choices_of(layer, own, candidates, wide)
            at = _borders(layer, choices, blocks)
            items_by_size = {size: _item(layer, size) for size in np.diff(at).tolist()}
            where = environment.scheme, environment.topology
            costs = {size: bytes_of_choices(choices, one, *where) for size, one in items_by_size.items()}
            known[key] = (choices, at, costs)
        choices, at, costs = known[key]
        for start, end in pairwise(at):
            size = end - start
            items.append((number, _item(layer, size), choices, costs[size], choices.index(own), start))
    numbers, specs, rows, sent, reference, starts = zip(*items, strict=True) if items else [()] * 6
    table = np.full((len(rows), max(map(len, rows), default=1)), np.inf)
    for row, of_choices in enumerate(sent):
        table[row, : len(of_choices)] = of_choices
    layers, own_choices, begins = (np.array(c, dtype=np.int64) for c in (numbers, reference, starts))
    return CandidateLevels(layers, specs, rows, table, own_choices, begins)


def _borders(layer: LayerSpec, choices: Sequence[Compressor], blocks: int) -> list[int]:
    """Returns the elements at which the blocks of a layer begin, and the layer's end."""
    families = {(choice.family_string(), unit_of(choice, layer)) for choice in choices}
    count = count_for(layer, choices[0], blocks) if len(families) == 1 else 1
    return borders(layer, count, unit_of(choices[0], layer))


def _item(layer: LayerSpec, size: int) -> LayerSpec:
    """Returns the layer, or a block of ``size`` of its elements."""
    return layer if size == layer.size else replace(layer, shape=(size,))


def choices_of(
    layer: LayerSpec, own: Compressor, candidates: CandidatesByLayer, wide: bool = False
) -> tuple[Compressor, ...]:
    """Returns one layer's choices in the order given; its own compressor comes last if it was not among them."""
    _check_single(own)
    if candidates is None:
        levels: Candidates = default_levels(own, wide)
    elif callable(candidates):
        levels = candidates(layer, own)
    elif candidates == HYBRID:
        levels = hybrid_levels(layer)
    else:
        levels = candidates
        check_levels(levels)
        _check_range(own, levels)
    choices: dict[Compressor, None] = {}
    sent_exactly = False
    for candidate in levels:
        choice = resolve(own, candidate)
        # From some rank on the matrix is sent uncompressed: all such ranks are one choice.
        exact = isinstance(choice, LowRank) and not clamped_rank(layer.shape, choice.rank)
        if not (exact and sent_exactly):
            choices[choice] = None
        sent_exactly |= exact
    choices.setdefault(own)
    for choice in choices:
        _check_single(choice)
    return tuple(choices)


def _check_single(choice: Compressor) -> None:
    if isinstance(choice.level, tuple):
        raise ConfigError(f"a controller chooses between single levels per layer, got {choice.to_string()}")


def checked(choice: Any, what: str) -> int | float | Compressor:
    """Returns a level or a compressor, parsed from its string form if need be; errors begin with ``what``."""
    if isinstance(choice, str):
        choice = from_string(choice)
    if isinstance(choice, Compressor):
        if choice.changes:
            raise ConfigError(f"{what} must not be a schedule itself, got {choice.to_string()}")
        return choice
    if not is_number(choice) or not math.isfinite(choice):
        raise ConfigError(f"{what} must be a level, a compressor or a string form, got {choice!r}")
    return choice


def text(choice: int | float | Compressor) -> str | int | float:
    """Returns the choice as JSON holds it: the inverse of :func:`checked`."""
    return choice.to_string() if isinstance(choice, Compressor) else choice


def check_levels(levels: Candidates | None) -> None:
    """Raises ConfigError for levels that no layer can have; the layers' own checks come later."""
    if levels is None or levels == HYBRID:
        return
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise ConfigError(
            f"levels must be a sequence of levels or compressors, and not empty, or {HYBRID!r}, got {levels!r}"
        )
    for level in levels:
        checked(level, "each of the levels")


def resolve(own: Compressor, candidate: Candidate) -> Compressor:
    """Returns the compressor that a candidate means for a layer whose own compressor is ``own``."""
    if isinstance(candidate, str):
        return from_string(candidate)
    return candidate if isinstance(candidate, Compressor) else own.with_level(candidate)


def hybrid_levels(layer: LayerSpec) -> list[Candidate]:
    """Returns thirteen compressors around the references of Markov et al. 2024.

    The references are 4 bits, and TopK 1% and PowerSGD of rank 4 for convolutions or TopK 10% and rank 32 for matrices.
    """
    densities, ranks = _HYBRID_CONVOLUTIONS if len(layer.shape) > 2 else _HYBRID_MATRICES
    return [*map(Quantize, _HYBRID_BITS), *map(TopK, densities), *map(PowerSGD, ranks)]


def default_levels(own: Compressor, wide: bool = False) -> list[Candidate]:
    """Returns the range of Markov et al. 2024 around a compressor's own level, or its alternatives if it has no level.

    ``wide`` ranges are [D/4, 4 D] for ranks; for densities they also have [D/100, D/10] in steps of D/100; others stay.
    """
    level, inner = own.level, own
    while (below := getattr(inner, "inner", None)) is not None:
        inner = below
    knob = inner.level_field
    if knob in ("bits", "rank"):
        assert isinstance(level, int), "a number of bits, or a rank, is whole"
        times = 4 if wide and knob == "rank" else 2
        return [n for n in range(max(level // times, 1), times * level + 1) if _possible(own, n)]
    if knob == "density":
        assert isinstance(level, int | float), "a density is a number"
        hundredths = [*range(1, 10)] * wide + [*range(10, 1001, 10)]
        steps = ((i, float(f"{level * i / 100:.12g}")) for i in hundredths)
        return [level if i == 100 else density for i, density in steps if density <= 1.0]
    if found := own.alternatives():
        return list(found)
    raise ConfigError(f"there is no default range of levels for {own.to_string()}: give levels=")


def _possible(own: Compressor, level: Level) -> bool:
    try:
        own.with_level(level)
    except ConfigError:
        return False
    return True


def _check_range(own: Compressor, candidates: Candidates) -> None:
    """Raises ConfigError unless levels that are numbers lie on both sides of the layer's own level."""
    numbers, level = [candidate for candidate in candidates if is_number(candidate)], own.level
    if numbers:
        if not isinstance(level, int | float):
            raise ConfigError(
                f"{own.to_string()} has no level, got levels {numbers}: give compressors instead"
            )
        if not min(numbers) <= level <= max(numbers):
            raise ConfigError(
                f"the reference level {level} of {own.to_string()} is outside of levels "
                f"{min(numbers)} to {max(numbers)}: add levels around it"
            )


@dataclass(frozen=True, eq=False)
class End:
    """The ``rows`` of a compressor family at one end of its range; ``share`` is their fraction of its elements."""

    family: str
    low: bool
    share: float
    rows: Numbers

    @property
    def words(self) -> str:
        side = "lowest" if self.low else "highest"
        return f"{self.share:.0%} of the elements under {self.family} have the {side} level of their range"


def crowded_ends(candidates: CandidateLevels, current: Numbers) -> list[End]:
    """Returns the ends that hold more than half of a family's elements.

    A layer counts for the family of its current compressor, at an end of that family's levels among the layer's
    choices. A layer with only one level of the family is at neither end.
    """
    elements: dict[str, int] = {}
    at: dict[tuple[str, bool], list[int]] = {}
    for row, k in enumerate(current.tolist()):
        chosen = candidates.choices[row][k]
        family = _family(chosen)
        elements[family] = elements.get(family, 0) + candidates.specs[row].size
        least, most = candidates.level_range(row, family)
        for low, level in ((True, least), (False, most)):
            if least < most and chosen.level == level:
                at.setdefault((family, low), []).append(row)
    ends = []
    for (family, low), rows in sorted(at.items()):
        share = sum(candidates.specs[row].size for row in rows) / max(elements[family], 1)
        if share > MOST:
            ends.append(End(family, low, share, np.array(rows, dtype=np.int64)))
    return ends


def goes_on(end: End, candidates: CandidateLevels, wider: CandidateLevels) -> bool:
    """Returns true if some layer at this end has a level beyond it in its ``wider`` range."""
    for row in end.rows.tolist():
        (low, high), (lowest, highest) = (c.level_range(row, end.family) for c in (candidates, wider))
        if lowest < low if end.low else highest > high:
            return True
    return False


def _family(compressor: Compressor) -> str:
    """Returns the names from the outermost wrapper to the innermost compressor."""
    inner = getattr(compressor, "inner", None)
    return compressor.name if inner is None else f"{compressor.name}[{_family(inner)}]"
