"""What every compressor is: a frozen configuration that turns a group into its mean over ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.distortion import Distortion
from gradcomp.compress.messages import Context, Exchange, Reduce
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.state import Begin
from gradcomp.kernels.codec import Codec, Group, Sizes, Table

#: The field that holds local momentum.
MOMENTUM = "momentum"


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors.

    A compressor is configuration only: it holds no state, draws no numbers of its own and never calls the network.
    ``name`` is the word in string forms; ``level_field`` names the field that a plan may vary per layer (None: there
    is none).
    """

    name: ClassVar[str]
    level_field: ClassVar[str | None] = None

    def __post_init__(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise ConfigError for fields that cannot be."""

    @property
    def level(self) -> Level:
        """The level that layers get unless a plan says otherwise."""
        return None if self.level_field is None else getattr(self, self.level_field)

    @property
    def keeps_residual(self) -> bool:
        """Whether layers under this compressor have a residual."""
        return False

    @property
    def residual_decay(self) -> float:
        """Factor on a residual when it is read."""
        return 1.0

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        """Bounds on what one rank's code loses of this layer; None where they depend on more than its shape."""
        return None

    @property
    def reduces(self) -> bool:
        """Whether exchanges are a Reduce, in whose payload layers that travel exactly can ride."""
        return False

    @property
    def contributes(self) -> bool:
        """Whether exchanges want c = scale g + decay r in memory: segments then always have a shadow."""
        return False

    @property
    def whole_model(self) -> bool:
        """Whether all layers must be exchanged together, once the last gradient has arrived."""
        return False

    @property
    def accounts(self) -> bool:
        """Whether the result is a mean of what the ranks sent, so that a residual can account for the rest."""
        return True

    @property
    def follows_rate(self) -> bool:
        """Whether residuals are multiplied by the last learning rate over this one when they are read."""
        return False

    @property
    def momentum(self) -> float:
        """Factor of the local momentum that is exchanged instead of the gradient; 0: none."""
        return 0.0

    @property
    def masks_momentum(self) -> bool:
        """Whether the momentum of an element that was sent starts again from zero."""
        return False

    @property
    def clip_norm(self) -> float | None:
        """Largest norm of one rank's share of a layer's result, times the square root of the number of ranks."""
        return None

    def with_level(self, level: Level) -> Compressor:
        """The same compressor at another level."""
        if level is None:
            return self
        if self.level_field is None:
            raise ConfigError(f"{self.name} has no level, got {level!r}")
        return dataclasses.replace(self, **{self.level_field: level})

    def dense(self) -> Compressor:
        """What takes this one's place while training warms up: nothing lost, momentum and clipping kept."""
        from gradcomp.compress.identity import Identity  # which is one of these

        return Identity()

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
        return {MOMENTUM: (layer.size, _zeros(layer.size))} if self.momentum else {}

    @abstractmethod
    def fill(self, table: Table, level: Level) -> None:
        """Write the level into the static columns of a table of whole or cut layers.

        ``bits`` holds what the level comes to: bits of a code, a rank, elements to select.
        """

    def cut_elements(self, layer: LayerSpec) -> int:
        """Slices and chunks of a layer may be cut at multiples of so many elements: here nowhere."""
        return max(layer.size, 1)

    def remark(self, layer: LayerSpec) -> str | None:
        """What a user may not expect of this layer, for the line that is logged at the start."""
        return None

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost."""
        return False

    def is_summed(self, layer: LayerSpec) -> bool:
        """Whether the transport's own allreduce adds this layer, element by element."""
        return False

    @abstractmethod
    def wire_bytes(self, group: Group) -> Sizes:
        """Bytes of every segment's payload, one direction, without headers; the most where data decide."""

    @abstractmethod
    def exchange(self, group: Group, context: Context) -> Exchange:
        """Turn the group's gradients into their mean over ranks: a generator of messages, sent their replies."""

    def to_string(self) -> str:
        """The string form, ``name:field=value,...``; ``registry.from_string`` is its inverse."""
        return self._string(self.name)

    def family_string(self) -> str:
        """The string form without the level: what a plan names, and what makes layers share a group."""
        return self._string(self.name, self.level_field)

    def _string(self, head: str, *without: str | None) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        text = ",".join(f"{k}={_text(v)}" for k, v in values.items() if k not in without)
        return f"{head}:{text}" if text else head


@dataclass(frozen=True)
class Coded(Compressor):
    """Base of the compressors whose codes a reduction adds: one Reduce."""

    @property
    def reduces(self) -> bool:
        """Yes."""
        return True

    @abstractmethod
    def codec_for(self, table: Table) -> Codec:
        """The codec under which a group with this table travels."""

    def wire_bytes(self, group: Group) -> Sizes:
        """The codec's formula."""
        return self.codec_for(group.table).wire_bytes(group.table)

    def exchange(self, group: Group, context: Context) -> Exchange:
        """One Reduce."""
        return (yield Reduce(self.codec_for(group.table), group)).flags


def _zeros(size: int) -> Begin:
    def begin(_: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.zeros(size, np.float32)

    return begin


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Compressor):
        return f"[{value.to_string()}]"
    if isinstance(value, tuple):
        return "/".join(map(_text, value)) + ("/" if len(value) == 1 else "")
    return str(value).lower() if isinstance(value, bool) else str(value)
