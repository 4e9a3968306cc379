"""A compressor is a frozen configuration that turns a group of gradients into their mean over ranks."""

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
from gradcomp.compress.checks import is_number
from gradcomp.compress.messages import Exchange, Reduce
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.state import Begin
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.step import StepContext

#: This field holds the local momentum.
MOMENTUM = "momentum"
#: This momentum factor stands for the optimizer's own, which may differ between layers and change with every step.
OPTIMIZER = "optimizer"
#: Names of fields that are kept once for all layers begin with this.
SHARED = "shared_"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Describe a compressor to the pipeline, to policies and to controllers.

    ``keeps_residual``: its layers have a residual, which is multiplied by ``residual_decay`` when it is read and, with
    ``follows_rate``, by the last step's learning rate over this step's. ``accounts``: the result is a mean of what the
    ranks sent, so that a residual can hold the rest.

    ``momentum``: the factor of the local momentum that is exchanged instead of the gradient; 0: none;
    :data:`OPTIMIZER`: the factor that the optimizer has for the layer, which the step context holds.
    ``masks_momentum``: the momentum of an element that was sent is reset to zero. ``clip_norm``: the largest norm of
    one rank's share of a layer's result, times the square root of the number of ranks; None: no clipping.

    ``reduces``: the exchange is a Reduce, and layers that travel exactly can be added to its payload. ``contributes``:
    the exchange reads c = scale g + decay r from memory, so every segment has a next residual to write it to.
    ``whole_model``: all layers are exchanged together, once the last gradient has arrived. ``exact``: nothing is lost.
    ``learns``: what is sent depends on what was learned in earlier steps, so its steps have an order, and controllers
    cannot choose its level. ``joins``: layers are compressed as one vector, so there is no state by layer.
    ``by_times``: results depend on measured times, so two runs differ. ``fakes``: means are not those of the gradients,
    so that no checkpoint should be saved.
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
    joins: bool = False
    by_times: bool = False
    fakes: bool = False

    @property
    def preconditions(self) -> bool:
        """Return whether momentum or clipping changes gradients before they are compressed."""
        return bool(self.momentum) or self.clip_norm is not None

    @classmethod
    def of_rounding(cls, rounding: str, feedback: bool | None, decay: float = 1.0) -> Traits:
        """Return a quantiser's traits. If ``feedback`` is None, there is a residual where rounding is biased."""
        keeps = rounding == "nearest" if feedback is None else feedback
        return cls(keeps_residual=keeps, residual_decay=decay, reduces=True)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Hold the bytes of every segment: in one rank's Broadcast, in every rank's Gather, and in a Sum."""

    led: npt.NDArray[np.float64]
    gathered: npt.NDArray[np.float64]
    summed: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors.

    A compressor is configuration only: it holds no state, draws no random numbers of its own and never calls the
    network. ``name`` is its name in string forms; ``level_field`` names the field that a plan may vary per layer (None:
    there is none); ``levels_by_block`` allows a level for each block of a layer's rows.
    """

    name: ClassVar[str]
    level_field: ClassVar[str | None] = None
    levels_by_block: ClassVar[bool] = False

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are left out of a pickle, which holds the fields alone.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __post_init__(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise ConfigError for fields that are not allowed."""

    @property
    def level(self) -> Level:
        """Return the level that layers get unless a plan says otherwise."""
        return None if self.level_field is None else getattr(self, self.level_field)

    @property
    def by_block(self) -> bool:
        """Return whether the level may be a tuple, with one entry for each block of a layer's rows."""
        return self.levels_by_block

    @cached_property
    def traits(self) -> Traits:
        """Return the properties of this compressor that other modules use; they never change."""
        return Traits()

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        """Return a bound on the error of one rank's code of this layer; None if it depends on more than the shape."""
        return None

    def with_level(self, level: Level) -> Compressor:
        """Return the same compressor at another level."""
        if level is None:
            return self
        if self.level_field is None:
            raise ConfigError(f"{self.name} has no level, got {level!r}")
        return dataclasses.replace(self, **{self.level_field: level})

    def alternatives(self) -> tuple[Compressor, ...]:
        """Return a controller's default choices for a compressor without a level, itself included; empty for none."""
        return ()

    def dense(self, exact: Compressor) -> Compressor:
        """Return the compressor of a warm-up: ``exact``, with this compressor's momentum and clipping."""
        return exact

    def at_step(self, step: int) -> Compressor:
        """Return the compressor of one step, which differs from this one if this is a schedule. Plans contain it."""
        return self

    def bare(self) -> Compressor:
        """Return the compressor without the momentum, clipping, feedback and schedule around it."""
        return self

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the steps at which the result of :meth:`at_step` changes, ascending."""
        return ()

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """Return a layer's state except its residual: name -> (float32 elements, initial values)."""
        return {MOMENTUM: (layer.size, zeros(layer.size))} if self.traits.momentum else {}

    def shared_fields(self, seed: int, ranks: int) -> dict[str, tuple[int, Begin]]:
        """Return state that is kept once for all of its layers, equal on all ranks and independent of the loss scale.

        Names begin with :data:`SHARED`. The state is stored with the first of these layers (``Fields.holder``).
        ``ranks``: how many ranks train. The initial values may be computed from the state of another number of ranks;
        StateError if they cannot.
        """
        return {}

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        """Return the compressors of layers that get another one because of their place in the model, by layer name.

        ``own``: the layers that this compressor was chosen for; ``layers``: all. ConfigError for a model that it cannot
        serve.
        """
        return {}

    @abstractmethod
    def fill(self, table: Table, level: Level) -> None:
        """Write one level into the static columns of a table of whole layers or parts of layers.

        The column ``level`` holds the number that the kernel needs: the bits of a code, a rank, or a count of elements.
        """

    def cut_elements(self, layer: LayerSpec) -> int:
        """Return the granularity at which a layer may be cut into slices and chunks: here the whole layer."""
        return max(layer.size, 1)

    def remark(self, layer: LayerSpec) -> str | None:
        """Return a warning about this layer that is logged at the start, or None."""
        return None

    def is_summed(self, layer: LayerSpec) -> bool:
        """Return whether the transport's own allreduce adds this layer, element by element."""
        return False

    @abstractmethod
    def wire_bytes(self, group: Group) -> Sizes:
        """Return the payload bytes of every segment in one direction, without headers; the maximum where they vary."""

    def traffic(self, group: Group) -> Traffic:
        """Return :meth:`wire_bytes` by kind of message, averaged over steps; for exchanges that Broadcast first."""
        payload = self.wire_bytes(group).astype(np.float64)
        return Traffic(np.zeros_like(payload), np.zeros_like(payload), payload)

    @abstractmethod
    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Yield messages, receive their replies, and write the group's mean over ranks to its outputs."""

    def to_string(self) -> str:
        """Return the string form, ``name:field=value,...``; ``registry.from_string`` is its inverse."""
        return self._string(self.name)

    def family_string(self) -> str:
        """Return the string form without the level, which plans name; layers of one family share a group."""
        return self._string(self.name, self.level_field)

    def short_string(self) -> str:
        """Return a string form for logs: the level, or else a first field of text, and all that are not default."""
        return self._string(self.name, *self._defaults())

    def _defaults(self) -> list[str]:
        """Return the names of the fields that have their default value and need not be shown."""
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
    """Base of the compressors whose codes a reduction adds: the exchange is one Reduce."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(reduces=True)

    @abstractmethod
    def codec_for(self, table: Table) -> Codec:
        """Return the codec that encodes a group with this table."""

    def wire_bytes(self, group: Group) -> Sizes:
        return self.codec_for(group.table).wire_bytes(group.table)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        codec = group.scratch.once("codec", lambda: self.codec_for(group.table))
        return (yield Reduce(codec, group)).flags


def check_momentum_factor(value: object, name: str) -> None:
    """Raise ConfigError unless the value is in [0, 1) or is :data:`OPTIMIZER`."""
    if value != OPTIMIZER and not (is_number(value) and 0.0 <= value < 1.0):
        raise ConfigError(f"{name} must be in [0, 1), or {OPTIMIZER!r}, got {value!r}")


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def zeros(size: int) -> Begin:
    """Return a function that initialises a field of ``size`` elements with zeros."""
    return lambda _: np.zeros(size, np.float32)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Compressor):
        return f"[{value.to_string()}]"
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) + ("/" if len(value) == 1 else "")
    return str(value).lower() if isinstance(value, bool) else str(value)
