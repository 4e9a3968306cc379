"""Wrappers: compressors that change how another one is fed or scheduled, and leave the exchange to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from gradcomp.compress.base import Compressor, Traffic, Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.messages import Exchange
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.state import Begin
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext

W = TypeVar("W", bound="Wrapper")


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Base of the wrappers. ``inner`` may be a string form. At run time there is one exchange, the innermost one's."""

    inner: Compressor

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            object.__setattr__(self, "inner", from_string(self.inner))
        if not isinstance(self.inner, Compressor):
            raise ConfigError(f"{self.name} wraps a compressor or its string form, got {self.inner!r}")

    def around(self: W, inner: Compressor) -> W:
        """The same wrapper around another compressor."""
        return dataclasses.replace(self, inner=inner)

    @property
    def level(self) -> Level:
        """The inner one's."""
        return self.inner.level

    @property
    def by_block(self) -> bool:
        """The inner one's."""
        return self.inner.by_block

    def with_level(self, level: Level) -> Compressor:
        """The inner one at another level, wrapped."""
        return self.around(self.inner.with_level(level))

    def alternatives(self) -> tuple[Compressor, ...]:
        """The inner one's, wrapped."""
        return tuple(self.around(inner) for inner in self.inner.alternatives())

    def dense(self, exact: Compressor) -> Compressor:
        """Wrapped as this one is."""
        return self.around(self.inner.dense(exact))

    def at_step(self, step: int) -> Compressor:
        """Wrapped as this one is."""
        return self.around(self.inner.at_step(step))

    def bare(self) -> Compressor:
        """The inner one's."""
        return self.inner.bare()

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        """The inner one's."""
        return self.inner.distortion(layer)

    @property
    def changes(self) -> tuple[int, ...]:
        """The inner one's."""
        return self.inner.changes

    @cached_property
    def traits(self) -> Traits:
        """The inner one's."""
        return self.inner.traits

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """The inner one's, and those that the wrapper brings."""
        return {**self.inner.fields(layer, seed), **super().fields(layer, seed)}

    def shared_fields(self, seed: int, ranks: int) -> dict[str, tuple[int, Begin]]:
        """The inner one's."""
        return self.inner.shared_fields(seed, ranks)

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        """The inner one's, wrapped."""
        return {name: self.around(inner) for name, inner in self.inner.by_place(own, layers).items()}

    def fill(self, table: Table, level: Level) -> None:
        """As the inner one."""
        self.inner.fill(table, level)

    def cut_elements(self, layer: LayerSpec) -> int:
        """As the inner one."""
        return self.inner.cut_elements(layer)

    def remark(self, layer: LayerSpec) -> str | None:
        """As the inner one."""
        return self.inner.remark(layer)

    def is_summed(self, layer: LayerSpec) -> bool:
        """As the inner one."""
        return self.inner.is_summed(layer)

    def wire_bytes(self, group: Group) -> Sizes:
        """As the inner one."""
        return self.inner.wire_bytes(group)

    def traffic(self, group: Group) -> Traffic:
        """As the inner one."""
        return self.inner.traffic(group)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """The inner one's; what wrappers change is in the group, the context and the state."""
        return self.inner.exchange(group, context)

    def to_string(self) -> str:
        """``name[inner]:field=value,...``."""
        return self._string(f"{self.name}[{self.inner.to_string()}]", "inner")

    def short_string(self) -> str:
        """That of the inner one within brackets."""
        return self._string(f"{self.name}[{self.inner.short_string()}]", "inner", *self._defaults())

    def family_string(self) -> str:
        """The same, without the inner one's level."""
        return self._string(f"{self.name}[{self.inner.family_string()}]", "inner")
