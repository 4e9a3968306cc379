"""What every compressor is: a frozen configuration that turns a group into its mean over ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from gradcomp.compress.messages import Context, Exchange
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Group, Sizes, Table


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors.

    A compressor is configuration only: it holds no state, draws no numbers of its own and never calls the network.
    ``name`` is the word in string forms; ``level_field`` names the field that a plan may vary per layer (None: there
    is none).
    """

    name: ClassVar[str]
    level_field: ClassVar[str | None] = None

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

    @abstractmethod
    def fill(self, table: Table, level: Level) -> None:
        """Write the level into the static columns (``bits``, ``bucket_size``) of a segment table."""

    @abstractmethod
    def cut_elements(self, layer: LayerSpec) -> int:
        """Slices and chunks of a layer may be cut at multiples of so many elements."""

    def is_summed(self, layer: LayerSpec) -> bool:
        """Whether the transport's own allreduce adds this layer, element by element."""
        return False

    @abstractmethod
    def codec_for(self, table: Table) -> Codec:
        """The codec under which a group with this table travels."""

    def wire_bytes(self, table: Table) -> Sizes:
        """Bytes of every segment's payload, one direction, without headers."""
        return self.codec_for(table).wire_bytes(table)

    @abstractmethod
    def exchange(self, group: Group, context: Context) -> Exchange:
        """Turn the group's gradients into their mean over ranks: a generator of messages, sent their replies."""

    def to_string(self) -> str:
        """The string form, ``name:field=value,...``; ``registry.from_string`` is its inverse."""
        fields = ",".join(f"{k}={_text(v)}" for k, v in dataclasses.asdict(self).items())
        return f"{self.name}:{fields}" if fields else self.name

    def family_string(self) -> str:
        """The string form without the level: what a plan names, and what makes layers share a group."""
        fields = dataclasses.asdict(self)
        if self.level_field is not None:
            del fields[self.level_field]
        text = ",".join(f"{k}={_text(v)}" for k, v in fields.items())
        return f"{self.name}:{text}" if text else self.name


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
