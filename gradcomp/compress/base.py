"""What every compressor is: a frozen configuration that turns a group into its mean over ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.messages import Exchange, Reduce
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.state import Begin
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.step import StepContext

#: The field that holds local momentum.
MOMENTUM = "momentum"
#: A momentum factor that is the optimizer's own, which may differ between layers and change with every step.
OPTIMIZER = "optimizer"
#: What names of fields begin with that are kept once for all layers.
SHARED = "shared_"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the pipeline, policies and controllers must know of a compressor beside its exchange.

    ``keeps_residual``: layers under it have a residual, which is multiplied by ``residual_decay`` when it is read and,
    with ``follows_rate``, by the last learning rate over this one. ``accounts``: the result is a mean of what the ranks
    sent, so that a residual can account for the rest.

    ``momentum``: factor of the local momentum that is exchanged instead of the gradient; 0: none; :data:`OPTIMIZER`:
    the layer's own in the optimizer, which the context has. ``masks_momentum``: the momentum of an element that was
    sent starts again from zero. ``clip_norm``: the largest norm of one rank's share of a layer's result, times the
    square root of the number of ranks; None: no clipping.

    ``reduces``: exchanges are a Reduce, in whose payload layers that travel exactly can ride. ``contributes``: they
    want c = scale g + decay r in memory, so that segments always have a next residual. ``whole_model``: all layers
    must be exchanged together, once the last gradient has arrived. ``exact``: nothing is lost. ``learns``: what is sent
    depends on what earlier steps have taught it, so that its steps have an order, and a level is no matter of choice.
    ``by_times``: results depend on measured times, so that no two runs are alike.
    """

    keeps_residual: bool = False
    residual_decay: float = 1.0
    follows_rate: bool = False
    accounts: bool = True
    momentum: float | str = 0.0
    masks_momentum: bool = False
    clip_norm: float | None = None
    reduces: bool = False
    contributes: bool = False
    whole_model: bool = False
    exact: bool = False
    learns: bool = False
    by_times: bool = False

    @property
    def preconditions(self) -> bool:
        """Whether momentum or clipping acts on gradients before they are compressed."""
        return bool(self.momentum) or self.clip_norm is not None


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of every segment: of one rank's Broadcast, of every rank's Gather, and of a Sum."""

    led: npt.NDArray[np.float64]
    gathered: npt.NDArray[np.float64]
    summed: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors.

    A compressor is configuration only: it holds no state, draws no numbers of its own and never calls the network.
    ``name`` is the word in string forms; ``level_field`` names the field that a plan may vary per layer (None: there
    is none), ``levels_by_block``: also by block of a layer's rows.
    """

    name: ClassVar[str]
    level_field: ClassVar[str | None] = None
    levels_by_block: ClassVar[bool] = False

    def __getstate__(self) -> dict[str, Any]:
        # A pickle holds the fields alone.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __post_init__(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise ConfigError for fields that cannot be."""

    @property
    def level(self) -> Level:
        """The level that layers get unless a plan says otherwise."""
        return None if self.level_field is None else getattr(self, self.level_field)

    @property
    def by_block(self) -> bool:
        """Whether the level may be a tuple, with one for each block of a layer's rows."""
        return self.levels_by_block

    @cached_property
    def traits(self) -> Traits:
        """What others must know of it; a constant of the instance."""
        return Traits()

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        """Bounds on what one rank's code loses of this layer; None where they depend on more than its shape."""
        return None

    def with_level(self, level: Level) -> Compressor:
        """The same compressor at another level."""
        if level is None:
            return self
        if self.level_field is None:
            raise ConfigError(f"{self.name} has no level, got {level!r}")
        return dataclasses.replace(self, **{self.level_field: level})

    def alternatives(self) -> tuple[Compressor, ...]:
        """A controller's default choices where there is no level, this one among them; empty: there are none."""
        return ()

    def dense(self, exact: Compressor) -> Compressor:
        """What takes this one's place while training warms up: ``exact``, with this one's momentum and clipping."""
        return exact

    def at_step(self, step: int) -> Compressor:
        """The compressor of a step, for those that are a schedule of others. Plans hold what this gives."""
        return self

    def bare(self) -> Compressor:
        """What compresses, without the momentum, clipping, feedback and schedules that act around it."""
        return self

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps at which :meth:`at_step` begins to give something else, ascending."""
        return ()

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """What is kept for a layer beside its residual: name -> (float32 elements, how to begin)."""
        return {MOMENTUM: (layer.size, zeros(layer.size))} if self.traits.momentum else {}

    def shared_fields(self, seed: int, ranks: int) -> dict[str, tuple[int, Begin]]:
        """What is kept once for all layers under it, the same on all ranks, whatever gradients are measured in.

        Names begin with :data:`SHARED`. It is a field of the first of these layers (``Fields.holder``). ``ranks``: how
        many train. What begins it may be what another number of ranks had; StateError if it cannot be.
        """
        return {}

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        """What layers get instead of it, by name, because of their place in the model.

        ``own``: the layers that are to travel under it; ``layers``: all. ConfigError for a model that it does not suit.
        """
        return {}

    @abstractmethod
    def fill(self, table: Table, level: Level) -> None:
        """Write one level into the static columns of a table of whole or cut layers.

        The column ``level`` holds what that comes to: bits of a code, a rank, elements to select.
        """

    def cut_elements(self, layer: LayerSpec) -> int:
        """Slices and chunks of a layer may be cut at multiples of so many elements: here nowhere."""
        return max(layer.size, 1)

    def remark(self, layer: LayerSpec) -> str | None:
        """What a user may not expect of this layer, for the line that is logged at the start."""
        return None

    def is_summed(self, layer: LayerSpec) -> bool:
        """Whether the transport's own allreduce adds this layer, element by element."""
        return False

    @abstractmethod
    def wire_bytes(self, group: Group) -> Sizes:
        """Bytes of every segment's payload, one direction, without headers; the most where data decide."""

    def traffic(self, group: Group) -> Traffic:
        """Where exchanges begin with a Broadcast: :meth:`wire_bytes` by kind of message, in the mean over steps."""
        payload = self.wire_bytes(group).astype(np.float64)
        return Traffic(np.zeros_like(payload), np.zeros_like(payload), payload)

    @abstractmethod
    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Turn the group's gradients into their mean over ranks: a generator of messages, sent their replies."""

    def to_string(self) -> str:
        """The string form, ``name:field=value,...``; ``registry.from_string`` is its inverse."""
        return self._string(self.name)

    def family_string(self) -> str:
        """The string form without the level: what a plan names, and what makes layers share a group."""
        return self._string(self.name, self.level_field)

    def short_string(self) -> str:
        """A string form for people: the level, or what stands first, and the fields that are not their default."""
        return self._string(self.name, *self._defaults())

    def _defaults(self) -> list[str]:
        """Fields that say nothing new."""
        fields = dataclasses.fields(self)
        first = fields[0].name if fields and isinstance(getattr(self, fields[0].name), str) else None
        shown = self.level_field or first
        return [f.name for f in fields if f.name != shown and getattr(self, f.name) == _default(f)]

    def _string(self, head: str, *without: str | None) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        text = ",".join(f"{k}={_text(v)}" for k, v in values.items() if k not in without)
        return f"{head}:{text}" if text else head


@dataclass(frozen=True)
class Coded(Compressor):
    """Base of the compressors whose codes a reduction adds: one Reduce."""

    @cached_property
    def traits(self) -> Traits:
        """Exchanges are a Reduce."""
        return Traits(reduces=True)

    @abstractmethod
    def codec_for(self, table: Table) -> Codec:
        """The codec under which a group with this table travels."""

    def wire_bytes(self, group: Group) -> Sizes:
        """The codec's formula."""
        return self.codec_for(group.table).wire_bytes(group.table)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """One Reduce."""
        return (yield Reduce(self.codec_for(group.table), group)).flags


def check_momentum_factor(value: object, name: str) -> None:
    """ConfigError unless it is in [0, 1), or :data:`OPTIMIZER`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != OPTIMIZER and not (number and 0.0 <= value < 1.0):  # type: ignore[operator]
        raise ConfigError(f"{name} must be in [0, 1), or {OPTIMIZER!r}, got {value!r}")


def zeros(size: int) -> Begin:
    """Begins a field of so many elements with zeros."""

    def begin(_: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.zeros(size, np.float32)

    return begin


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Compressor):
        return f"[{value.to_string()}]"
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) + ("/" if len(value) == 1 else "")
    return str(value).lower() if isinstance(value, bool) else str(value)
