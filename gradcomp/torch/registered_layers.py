"""The layers that a program registers by name and size before DDP has them, and the rules by which they travel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.policy import resolve
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.strings import closest
from gradcomp.torch.modules import bare

#: Number of elements by layer name.
Sizes = Mapping[str, int]


def sizes_of(layers: Any) -> Sizes:
    """Return names and sizes of a model's parameters, or of pairs of a name and a number of elements or a shape.

    ConfigError for anything else, for a name that occurs twice, and if there are none.
    """
    if isinstance(layers, torch.nn.Module):
        pairs: list[Any] = [(name, parameter.numel()) for name, parameter in bare(layers).named_parameters()]
    else:
        try:
            pairs = list(layers)
        except TypeError as error:
            raise ConfigError(
                f"layers must be a model, or pairs of a name and a size, got {type(layers).__name__}"
            ) from error
    sizes: dict[str, int] = {}
    for pair in pairs:
        name, size = pair if isinstance(pair, Sequence) and len(pair) == 2 else (None, None)
        shape: Sequence[Any] = size if isinstance(size, Sequence) else (size,)
        if not isinstance(name, str) or not all(type(length) is int and length >= 0 for length in shape):
            raise ConfigError(
                f"a layer must be a pair of a name and a number of elements or a shape, got {pair!r}"
            )
        if name in sizes:
            raise ConfigError(f"layer names must be unique; {name!r} occurs twice")
        sizes[name] = math.prod(shape)
    if not sizes:
        raise ConfigError("there is no layer to register")
    return sizes


@dataclass(eq=False)
class _Model:
    """A registered model; ``wrapped`` is set once a DistributedDataParallel has its layers."""

    sizes: Sizes
    wrapped: bool = False

    def difference(self, layers: Sizes) -> str:
        """Return how a DistributedDataParallel's layers differ from these; empty if all of them are among these."""
        for name, size in layers.items():
            if name not in self.sizes:
                return f"layer {name!r} is not registered"
            if self.sizes[name] != size:
                return f"layer {name!r} has {size} elements, and was registered with {self.sizes[name]}"
        return ""


class RegisteredLayers:
    """All models that a program has registered, and its rules, of which the last one that matches a layer applies."""

    def __init__(self) -> None:
        self._models: list[_Model] = []
        self._rules: dict[str, Compressor] = {}
        self._unregistered: list[
            Sizes
        ] = []  # what instances of DistributedDataParallel had before any registration

    def add_model(self, sizes: Sizes) -> None:
        """Register a model. ConfigError if it is registered already, StateError if DDP has its layers already."""
        if any(model.sizes == sizes for model in self._models):
            raise ConfigError("these layers are registered already")
        if any(not _Model(sizes).difference(layers) for layers in self._unregistered):
            raise StateError(
                "a DistributedDataParallel exchanges these layers already: register the model before it is wrapped"
            )
        self._models.append(_Model(sizes))

    def add_rule(self, pattern: str, compression: Compressor | str) -> None:
        """Let layers travel by ``compression`` whose name contains or, with ``*``, ``?`` or ``[``, matches ``pattern``.

        ConfigError if the pattern matches no layer, StateError if none of its layers is yet to be wrapped.
        """
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"a pattern must be a text that is not empty, got {pattern!r}")
        compressor = resolve(compression)
        glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
        matched = [model for model in self._models if any(fnmatchcase(name, glob) for name in model.sizes)]
        if not self._models:
            raise StateError("no layers are registered: call register_model(layers) first")
        if not matched:
            near = closest(pattern, [name for model in self._models for name in model.sizes])
            raise ConfigError(
                f"{pattern!r} matches no registered layer" + (f" (did you mean {near}?)" if near else "")
            )
        if all(model.wrapped for model in matched):
            raise StateError(
                f"a DistributedDataParallel exchanges the layers of {pattern!r} already: name them before the model is "
                "wrapped, or call hook_state(ddp).set_compression(...)"
            )
        self._rules.pop(glob, None)
        self._rules[glob] = compressor

    def policy(self, layers: Sizes, default: Policy) -> Policy:
        """Return the policy for a DistributedDataParallel with these layers: ``default``, and the rules that match.

        ConfigError if there are registered models and the layers are of none of them.
        """
        if not self._models:
            self._unregistered.append(layers)
            return default
        model = next((one for one in self._models if not one.difference(layers)), None)
        if model is None:
            nearest = max(self._models, key=lambda one: len(one.sizes.keys() & layers.keys()))
            raise ConfigError(
                f"the layers of this DistributedDataParallel are of no registered model: {nearest.difference(layers)}. "
                "Register every model, or none; to exchange one without gradcomp, give its DistributedDataParallel "
                'process_group=dist.new_group(backend="gloo")'
            )
        model.wrapped = True
        rules = {
            glob: rule
            for glob, rule in reversed(self._rules.items())
            if any(fnmatchcase(name, glob) for name in layers)
        }
        return replace(default, overrides={**rules, **default.overrides})
