"""Wrapper is the base of compressors that change another compressor's input, or when it is used."""

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
    """Base of the wrappers, which delegate to ``inner`` whatever they do not override.

    ``inner`` may be given as a string form. A wrapper's own string form is ``name[inner]:field=value,...``. A group is
    exchanged once in a step, however many wrappers there are.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            object.__setattr__(self, "inner", from_string(self.inner))
        if not isinstance(self.inner, Compressor):
            raise ConfigError(f"{self.name} wraps a compressor or its string form, got {self.inner!r}")
        if self.inner.traits.fakes:
            raise ConfigError(
                f"{self.inner.name} sends no gradient that {self.name} could wrap: use it alone"
            )
        if self.inner.traits.joins and (self.traits.keeps_residual or self.traits.preconditions):
            raise ConfigError(
                f"{self.name} keeps a residual or momentum by layer, or clips by layer, and {self.inner.name} knows no "
                "layers"
            )

    def around(self: W, inner: Compressor) -> W:
        """Return the same wrapper around another compressor."""
        return dataclasses.replace(self, inner=inner)

    @property
    def level(self) -> Level:
        return self.inner.level

    @property
    def by_block(self) -> bool:
        return self.inner.by_block

    def with_level(self, level: Level) -> Compressor:
        return self.around(self.inner.with_level(level))

    def alternatives(self) -> tuple[Compressor, ...]:
        return tuple(self.around(inner) for inner in self.inner.alternatives())

    def dense(self, exact: Compressor) -> Compressor:
        return self.around(self.inner.dense(exact))

    def at_step(self, step: int) -> Compressor:
        return self.around(self.inner.at_step(step))

    def bare(self) -> Compressor:
        return self.inner.bare()

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        return self.inner.distortion(layer)

    @property
    def changes(self) -> tuple[int, ...]:
        return self.inner.changes

    @cached_property
    def traits(self) -> Traits:
        return self.inner.traits

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """Return the fields of the inner compressor, and those that the wrapper adds."""
        return {**self.inner.fields(layer, seed), **super().fields(layer, seed)}

    def shared_fields(self, seed: int, ranks: int) -> dict[str, tuple[int, Begin]]:
        return self.inner.shared_fields(seed, ranks)

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        return {name: self.around(inner) for name, inner in self.inner.by_place(own, layers).items()}

    def fill(self, table: Table, level: Level) -> None:
        self.inner.fill(table, level)

    def cut_elements(self, layer: LayerSpec) -> int:
        return self.inner.cut_elements(layer)

    def remark(self, layer: LayerSpec) -> str | None:
        return self.inner.remark(layer)

    def is_summed(self, layer: LayerSpec) -> bool:
        return self.inner.is_summed(layer)

    def wire_bytes(self, group: Group) -> Sizes:
        return self.inner.wire_bytes(group)

    def traffic(self, group: Group) -> Traffic:
        return self.inner.traffic(group)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Run the inner exchange. The group reflects the wrapper's traits already, such as feedback and momentum."""
        return self.inner.exchange(group, context)

    def to_string(self) -> str:
        return self._string(f"{self.name}[{self.inner.to_string()}]", "inner")

    def short_string(self) -> str:
        return self._string(f"{self.name}[{self.inner.short_string()}]", "inner", *self._defaults())

    def family_string(self) -> str:
        return self._string(f"{self.name}[{self.inner.family_string()}]", "inner")
