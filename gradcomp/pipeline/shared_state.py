"""The state that all ranks of a job share is a plain value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradcomp.core.errors import GradcompError, StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import parse
from gradcomp.pipeline.switching import Switch

#: Settings that must be those of the saved run for the run to go on bit for bit; it goes on with others, too.
SETTINGS = ("seed", "slice_elements", "cold_after_steps", "reduction")

_LONGEST_STREAK = 2**62


@dataclass(frozen=True)
class Shared:
    """Holds the part of a snapshot that is equal on all ranks.

    ``layers`` maps names to (shape, dtype) in the order of registration, which numbers them. ``order`` has the
    names in bucket order. ``streaks`` counts, for every layer, steps present (> 0) or absent (< 0) in a row.
    ``settings`` are those named in :data:`SETTINGS`. Residuals are in gradient units divided by ``unit`` (Horovod's
    predivide factor). ``rate`` is the last step's learning rate, 0 if it is not known. ``control`` has the running
    controller's name and the state that its ranks share. ``switch`` is an unfinished change of compression, see
    :meth:`Switch.to_plain`.
    """

    step: int
    layers: Mapping[str, tuple[tuple[int, ...], str]]
    order: tuple[str, ...]
    plan: Plan
    cold: frozenset[str]
    sparse: frozenset[str]
    streaks: Mapping[str, int]
    settings: Mapping[str, int | str]
    unit: float = 1.0
    rate: float = 0.0
    control: Mapping[str, Any] | None = None
    switch: Mapping[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts, which JSON can hold; equal values give equal results."""
        return {
            "step": self.step,
            "layers": [[name, list(shape), dtype] for name, (shape, dtype) in self.layers.items()],
            "order": list(self.order),
            "plan": self.plan.to_json(),
            "cold": sorted(self.cold),
            "sparse": sorted(self.sparse),
            "streaks": {name: self.streaks[name] for name in self.layers},
            "settings": dict(self.settings),
            "unit": self.unit,
            "rate": self.rate,
            "control": self.control,
            "switch": self.switch,
        }

    @staticmethod
    def from_plain(data: Any) -> Shared:
        """Invert :meth:`to_plain`; raise StateError for anything else."""
        try:
            return _shared(data)
        except (KeyError, TypeError, ValueError, GradcompError) as error:
            raise StateError(f"not a compression state: {error!r}") from error


def _shared(data: Any) -> Shared:
    layers: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape, dtype in _sequence(mapping_of(data)["layers"]):
        spec = LayerSpec(
            _text(name), tuple(_number(size, 0, 2**48) for size in _sequence(shape)), _text(dtype)
        )
        if name in layers:
            raise ValueError(f"layer {name!r} appears twice")
        layers[spec.name] = (spec.shape, spec.dtype)
    order = tuple(_text(name) for name in _sequence(data["order"]))
    if sorted(order) != sorted(layers):
        raise ValueError("the bucket order is not a permutation of the layers")
    cold, sparse = (frozenset(_text(name) for name in _sequence(data[key])) for key in ("cold", "sparse"))
    if not cold <= layers.keys() or not sparse <= layers.keys():
        raise ValueError("a cold or sparse layer is not one of the layers")
    streaks = {
        _text(name): _number(streak, -_LONGEST_STREAK, _LONGEST_STREAK)
        for name, streak in mapping_of(data["streaks"]).items()
    }
    if streaks.keys() != layers.keys():
        raise ValueError("the streaks are not those of the layers")
    plan = Plan.from_json(_text(data["plan"]))
    if plan.by_layer.keys() != layers.keys():
        raise ValueError("the plan is not for these layers")
    found = mapping_of(data["settings"])
    settings: dict[str, int | str] = {name: _number(found[name], 0, 2**64 - 1) for name in SETTINGS[:3]}
    settings["reduction"] = str(parse(_text(found.get("reduction", "sra"))))  # older states have none
    unit = data["unit"]
    if type(unit) not in (int, float) or not 0 < unit < math.inf:
        raise ValueError(f"unit {unit!r}")
    rate = data.get("rate", 0.0)
    if type(rate) not in (int, float) or not 0 <= rate < math.inf:
        raise ValueError(f"rate {rate!r}")
    step = _number(data["step"], 0, 2**62)
    control = data.get("control")
    if control is not None and set(mapping_of(control)) != {"controller", "state"}:
        raise ValueError("the controller's state is malformed")
    switch = data.get("switch")
    if switch is not None:
        specs = [LayerSpec(name, shape, dtype) for name, (shape, dtype) in layers.items()]
        Switch.from_plain(mapping_of(switch), specs, step)  # raises for anything else
    return Shared(
        step, layers, order, plan, cold, sparse, streaks, settings, float(unit), float(rate), control, switch
    )


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def mapping_of(value: Any) -> Mapping[Any, Any]:
    """Return the value if it is a mapping; raise TypeError if not."""
    if not isinstance(value, dict):
        raise TypeError(f"expected a mapping, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number in {least} .. {most}, got {value!r:.40}")
    return value
