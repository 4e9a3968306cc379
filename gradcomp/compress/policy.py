"""A policy turns what the user asked for into a plan: which layer gets which compressor, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gradcomp.compress.base import Compressor
from gradcomp.compress.checks import check_number, check_whole
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.registry import REGISTERED, at_level, from_string
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Filter, LayerSpec
from gradcomp.core.plan import Assignment, Plan

#: The compressor of layers that are not worth compressing, in a model in which other layers are compressed.
EXACT = Cast("float32")

#: ``Policy(exact=...)`` may be one of these.
_EXACT = ("float32", "bf16")

#: ``compression="auto"`` chooses from these, which compress more and more: see :class:`gradcomp.control.auto.Auto`.
AUTO_CHOICES = ("none", "bf16", "quantize:bits=8", "quantize:bits=4")

#: A schedule maps (step, version) to the plan that begins at that step, or to None.
Schedule = Callable[[int, int], Plan | None]


@dataclass(frozen=True)
class Policy:
    """Choose a compressor for every layer: a default, a filter of layers that travel exactly, and overrides by name.

    ``overrides`` maps shell patterns on layer names to compressors (or string forms); the first match wins, also over
    the filter: ``Policy(Quantize(4), overrides={"head.*": "none", "embedding.*": Quantize(2)})``.

    ``exact``: how layers travel that the filter excludes. ``"float32"``: exactly, in the reduction's payload or in a
    sum. ``"bf16"``: rounded to bfloat16, 2 bytes per element and direction, with error feedback where ``default`` has
    it. Beside compressors that are not reduced, such layers take a reduction of their own, whose two rounds overlap
    with the exchange of the others. ConfigError for anything else. A layer that an override leaves uncompressed stays
    exact.
    """

    default: Compressor = field(default_factory=Identity)
    overrides: Mapping[str, Compressor | str] = field(default_factory=dict)
    filter: Filter = field(default_factory=Filter)
    exact: str = "float32"

    def __post_init__(self) -> None:
        if self.exact not in _EXACT:
            raise ConfigError(f"exact must be one of {', '.join(_EXACT)}, got {self.exact!r}")
        object.__setattr__(self, "default", resolve(self.default))
        object.__setattr__(self, "overrides", {name: resolve(c) for name, c in self.overrides.items()})

    def choose(self, layer: LayerSpec) -> tuple[Compressor, str | None]:
        """Return the layer's compressor and, if the layer is not compressed or only rounded to bfloat16, the reason."""
        if layer.dtype == "float64":
            return Identity(), "float64"
        for pattern, compressor in self.overrides.items():
            if fnmatchcase(layer.name, pattern):
                chosen = resolve(compressor)
                uncompressed = isinstance(chosen, Identity)
                return (self._exactly, f"override {pattern!r}") if uncompressed else (chosen, None)
        if isinstance(self.default, Identity):
            return self.default, "compression is none"
        reason = self.filter.reason_to_exclude(layer)
        return (self._excluded, reason) if reason else (self.default, None)

    def _placed(self, layers: Sequence[LayerSpec]) -> list[tuple[Compressor, str | None]]:
        """Return :meth:`choose` for all layers of a model, after compressors have replaced some by place."""
        chosen = [self.choose(layer) for layer in layers]
        own: dict[str, tuple[Compressor, list[LayerSpec]]] = {}
        for layer, (compressor, reason) in zip(layers, chosen, strict=True):
            if reason is None:
                own.setdefault(compressor.to_string(), (compressor, []))[1].append(layer)
        placed: dict[str, Compressor] = {}
        for compressor, members in own.values():
            placed |= compressor.by_place(members, layers)
        return [
            (placed.get(layer.name, compressor), reason)
            for layer, (compressor, reason) in zip(layers, chosen, strict=True)
        ]

    @property
    def _excluded(self) -> Compressor:
        """Return the compressor of excluded layers. They have the default's momentum and clipping, see ``_exactly``."""
        if self.exact == "float32":
            return self._exactly
        return self.default.dense(Cast("bfloat16", feedback=self.default.traits.keeps_residual))

    @property
    def _exactly(self) -> Compressor:
        """Return the compressor of layers that travel exactly.

        They are added to the payload of layers that are reduced, or to an allreduce if no layer is. They have the
        default's momentum and clipping, because the optimizer then has no momentum for any layer.
        """
        dense = self.default.dense(Identity())
        if dense.traits.preconditions:
            return dense
        reduces = self.exact != "float32" or any(c.traits.reduces for c in self.compressors)
        return EXACT if reduces else Identity()

    @property
    def title(self) -> str:
        """Return the name that logs show: the default's string form."""
        return self.default.to_string()

    @property
    def brief(self) -> str:
        """Return the title without those fields of the default compressor that have their default value."""
        return self.default.short_string()

    @property
    def compresses(self) -> bool:
        """Return whether any layer is compressed, if it is large enough."""
        return any(not compressor.traits.exact for compressor in self.compressors)

    def unmatched(self, layers: Sequence[LayerSpec]) -> list[str]:
        """Return the patterns, of overrides and of the filter, that match the name of no layer."""
        patterns = dict.fromkeys([*self.overrides, *self.filter.exclude, *self.filter.include])
        return [p for p in patterns if not any(fnmatchcase(layer.name, p) for layer in layers)]

    @property
    def compressors(self) -> list[Compressor]:
        """Return the default and the compressors of the overrides."""
        return [self.default, *(resolve(c) for c in self.overrides.values())]

    def plan(self, layers: Sequence[LayerSpec], version: int = 0, step: int = 0) -> Plan:
        """Return the plan for these layers at a step, with schedules replaced by what they give then."""
        placed = zip(layers, self._placed(layers), strict=True)
        return Plan(version, tuple(assign(layer.name, c.at_step(step)) for layer, (c, _) in placed))

    def scheduled(self, layers: Sequence[LayerSpec]) -> Schedule | None:
        """Return a function of step and version: the plan that begins at that step, or None.

        It is None if the plan never changes.
        """
        changes = {step for c in self.compressors for step in c.changes}
        if not changes:
            return None
        return lambda step, version: self.plan(layers, version, step) if step in changes else None

    @property
    def last_change(self) -> int:
        """Return the step from which on :meth:`plan` no longer changes."""
        return max((step for c in self.compressors for step in c.changes), default=0)

    def adjustable(self, layers: Sequence[LayerSpec]) -> list[Compressor | None]:
        """Return, by layer, the compressor that a controller may adjust after schedules have ended, or None."""
        chosen = self._placed(layers)
        last = [None if reason else c.at_step(self.last_change) for c, reason in chosen]
        return [None if c is None or c.traits.exact else c for c in last]

    def excluded(self, layers: Sequence[LayerSpec]) -> dict[str, str]:
        """Return name -> reason for the layers that are not compressed, or only rounded to bfloat16."""
        reasons = ((layer.name, self.choose(layer)[1]) for layer in layers)
        return {name: reason for name, reason in reasons if reason}


def assign(layer: str, compressor: Compressor) -> Assignment:
    """Return a plan's entry that gives a compressor to a layer, and holds it if its text leads back to its class."""
    entry = Assignment(layer, compressor.family_string(), compressor.level)
    if _is_registered(compressor):
        object.__setattr__(entry, "built", compressor)
    return entry


def _is_registered(compressor: Compressor) -> bool:
    inside = (value for value in vars(compressor).values() if isinstance(value, Compressor))
    return REGISTERED.get(compressor.name) is type(compressor) and all(map(_is_registered, inside))


def assigned(entry: Assignment) -> Compressor:
    """Return the compressor of a plan's entry: the one that it holds, or else what its text says."""
    return at_level(entry.compressor, entry.level) if entry.built is None else entry.built


def resolve(compression: Compressor | str) -> Compressor:
    """Return a compressor from itself or from its string form."""
    if isinstance(compression, str):
        return from_string(compression)
    if not isinstance(compression, Compressor):
        raise ConfigError(
            f"compression must be a compressor such as gc.Quantize(bits=4), or a string form, got {compression!r}"
        )
    return compression


def sparseloco(density: float, bits: int, chunk: int, decay: float) -> Policy:
    """Return SparseLoCo's compression of pseudo-gradients: all layers, whatever their size, by the largest of chunks.

    With one bit a value becomes the mean of those of its sign, else the nearest of 2^``bits`` levels between the least
    and the greatest of 64. Source: Sarfi et al. 2025. Differs: the released code has four bins in units of the
    standard deviation.
    """
    check_whole("bits", bits, 1, 8)
    check_whole("chunk", chunk)
    check_number("density", density, "(0, 1]")
    check_number("decay", decay, "[0, 1]")
    values = "one_bit" if bits == 1 else f"quantize:bits={bits},bucket_size=64,rounding=nearest"
    selected = from_string(f"chunked_topk:density={density},chunk={chunk},decay={decay},values=[{values}]")
    return Policy(selected, filter=Filter(exclude_kinds=(), min_elements=0, min_dimensions=0))


@dataclass(frozen=True)
class Automatic(Policy):
    """Let a controller choose the compressors of the layers that are worth compressing: ``compression="auto"``.

    ``default`` compresses most of what it may choose.
    """

    default: Compressor = field(default_factory=lambda: from_string(AUTO_CHOICES[-1]))

    @property
    def title(self) -> str:
        return "auto"

    @property
    def brief(self) -> str:
        return self.title


def as_policy(compression: Policy | Compressor | str) -> Policy:
    """Return the policy for a ``compression=`` argument."""
    if compression == "auto":
        return Automatic()
    return compression if isinstance(compression, Policy) else Policy(resolve(compression))


class Compression:
    """Name compressors as Horovod does: ``Compression.none``, ``.fp16`` and ``.bf16``."""

    none = Identity()
    fp16 = Cast("float16")
    bf16 = Cast("bfloat16")
