"""From what the user asked for to a plan: which layer gets which compressor, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gradcomp.compress.base import Compressor
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Filter, LayerSpec
from gradcomp.core.plan import Assignment, Plan

#: How a layer travels that is not worth compressing, beside layers that are.
EXACT = Cast("float32")

#: Of layers that are not worth compressing: what ``Policy(exact=...)`` may be.
_EXACT = ("float32", "bf16")

#: What ``compression="auto"`` chooses from, from least to most compression: see :class:`gradcomp.control.auto.Auto`.
AUTO_CHOICES = ("none", "bf16", "quantize:bits=8", "quantize:bits=4")

#: (step, version) -> the plan that begins at that step, if one does.
Schedule = Callable[[int, int], Plan | None]


@dataclass(frozen=True)
class Policy:
    """A default compressor, a filter of layers that travel exactly, and overrides by name pattern.

    ``overrides`` maps shell patterns on layer names to compressors (or string forms); the first match wins, over
    the filter too: ``Policy(Quantize(4), overrides={"head.*": "none", "embedding.*": Quantize(2)})``.

    ``exact``: how layers travel that the filter excludes. ``"float32"``: exactly, in the reduction's payload or in a
    sum. ``"bf16"``: rounded to bfloat16, 2 bytes an element and direction, with error feedback where ``default`` has
    it; beside compressors that do not reduce they take a reduction of their own, two rounds in which the others travel.
    ConfigError for anything else. What an override sends uncompressed stays exact.
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
        """The layer's compressor, and why it travels exactly if it does."""
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
        """:meth:`choose` for all layers of a model, some of which get another compressor because of their place."""
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
        """How layers travel that are excluded. Momentum and clipping of the default are theirs, as below."""
        if self.exact == "float32":
            return self._exactly
        return self.default.dense(Cast("bfloat16", feedback=self.default.traits.keeps_residual))

    @property
    def _exactly(self) -> Compressor:
        """How layers travel exactly.

        They ride in the payload of those that are reduced; with none of those, in an allreduce. Momentum and clipping
        of the default are theirs as well: the optimizer has none, and makes no difference between layers.
        """
        dense = self.default.dense(Identity())
        if dense.traits.preconditions:
            return dense
        reduces = self.exact != "float32" or any(c.traits.reduces for c in self.compressors)
        return EXACT if reduces else Identity()

    @property
    def title(self) -> str:
        """What is named in logs: the default's string form."""
        return self.default.to_string()

    @property
    def brief(self) -> str:
        """The title, without fields of the default compressor that are as they are anyway."""
        return self.default.short_string()

    @property
    def compresses(self) -> bool:
        """Whether any layer is to be compressed, if it is worth it."""
        return any(not compressor.traits.exact for compressor in self.compressors)

    def unmatched(self, layers: Sequence[LayerSpec]) -> list[str]:
        """The patterns, of overrides and of the filter, that match the name of no layer."""
        patterns = dict.fromkeys([*self.overrides, *self.filter.exclude, *self.filter.include])
        return [p for p in patterns if not any(fnmatchcase(layer.name, p) for layer in layers)]

    @property
    def compressors(self) -> list[Compressor]:
        """The default and those of the overrides."""
        return [self.default, *(resolve(c) for c in self.overrides.values())]

    def plan(self, layers: Sequence[LayerSpec], version: int = 0, step: int = 0) -> Plan:
        """The plan for these layers at a step: schedules are replaced by what they give then."""
        chosen = (
            (layer.name, c.at_step(step)) for layer, (c, _) in zip(layers, self._placed(layers), strict=True)
        )
        return Plan(version, tuple(Assignment(name, c.family_string(), c.level) for name, c in chosen))

    def scheduled(self, layers: Sequence[LayerSpec]) -> Schedule:
        """Asked with a step and a version, the plan that begins at that step, or None where none does."""
        changes = {step for c in self.compressors for step in c.changes}

        def begins(step: int, version: int) -> Plan | None:
            return self.plan(layers, version, step) if step in changes else None

        return begins

    @property
    def last_change(self) -> int:
        """The step from which on :meth:`plan` gives the same."""
        return max((step for c in self.compressors for step in c.changes), default=0)

    def adjustable(self, layers: Sequence[LayerSpec]) -> list[Compressor | None]:
        """What a controller may change, once schedules have ended: by layer, None for those that are excluded."""
        chosen = self._placed(layers)
        last = [None if reason else c.at_step(self.last_change) for c, reason in chosen]
        return [None if c is None or c.traits.exact else c for c in last]

    def excluded(self, layers: Sequence[LayerSpec]) -> dict[str, str]:
        """Name -> reason for the layers that are not compressed, or to bfloat16 at most."""
        reasons = ((layer.name, self.choose(layer)[1]) for layer in layers)
        return {name: reason for name, reason in reasons if reason}


def resolve(compression: Compressor | str) -> Compressor:
    """A compressor from itself or its string form."""
    if isinstance(compression, str):
        return from_string(compression)
    if not isinstance(compression, Compressor):
        raise ConfigError(
            f"compression must be a compressor such as gc.Quantize(bits=4), or a string form, got {compression!r}"
        )
    return compression


@dataclass(frozen=True)
class Automatic(Policy):
    """``compression="auto"``: a controller chooses how layers travel that are worth compressing, at most like this."""

    default: Compressor = field(default_factory=lambda: from_string(AUTO_CHOICES[-1]))

    @property
    def title(self) -> str:
        """As the user wrote it."""
        return "auto"

    @property
    def brief(self) -> str:
        """The same."""
        return self.title


def as_policy(compression: Policy | Compressor | str) -> Policy:
    """What the user passed as ``compression=``, as a policy."""
    if compression == "auto":
        return Automatic()
    return compression if isinstance(compression, Policy) else Policy(resolve(compression))


class Compression:
    """The names that Horovod's users know."""

    none = Identity()
    fp16 = Cast("float16")
    bf16 = Cast("bfloat16")
