"""A pipeline's state as a plain value: taken, restored, and taken over to more layers or other numbers of ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import MOMENTUM, SHARED
from gradcomp.compress.wrappers.ef21 import EF21_MEAN, EF21_MOMENTUM, EF21_OWN
from gradcomp.core.config import HOST_SLICE
from gradcomp.core.errors import GradcompError, StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import parse
from gradcomp.core.state import Begin, Fields, Range
from gradcomp.exchange.layout import build_layout, compressors_of, fields_of
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.plans import Switch

#: Settings that must be those of the saved run for the run to go on bit for bit; it goes on with others, too.
SETTINGS = ("seed", "slice_elements", "cold_after_steps", "reduction")

_LONGEST_STREAK = 2**62

logger = logging.getLogger("gradcomp")
Floats = npt.NDArray[np.float32]


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
        except (KeyError, TypeError, ValueError, OverflowError, GradcompError) as error:
            raise StateError(f"not a compression state: {error!r}") from error


def _shared(data: Any) -> Shared:
    layers: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape, dtype in _sequence(_mapping(data)["layers"]):
        sizes = tuple(_number(size, 0, 2**48) for size in _sequence(shape))
        spec = LayerSpec(_text(name), sizes, _text(dtype))
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
        for name, streak in _mapping(data["streaks"]).items()
    }
    if streaks.keys() != layers.keys():
        raise ValueError("the streaks are not those of the layers")
    plan = Plan.from_json(_text(data["plan"]))
    if plan.by_layer.keys() != layers.keys():
        raise ValueError("the plan is not for these layers")
    found = _mapping(data["settings"])
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
    if control is not None:
        if set(_mapping(control)) != {"controller", "state"}:
            raise ValueError("the controller's state is malformed")
        _mapping(control["state"])
    switch = data.get("switch")
    if switch is not None:
        specs = [LayerSpec(name, shape, dtype) for name, (shape, dtype) in layers.items()]
        Switch.from_plain(_mapping(switch), specs, step)  # raises for anything else
    return Shared(
        step, layers, order, plan, cold, sparse, streaks, settings, float(unit), float(rate), control, switch
    )


def _expected(kinds: type | tuple[type, ...], what: str, value: Any) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"expected {what}, got {type(value).__name__}")
    return value


_sequence: Callable[[Any], Sequence[Any]] = partial(_expected, (list, tuple), "a list")
_mapping: Callable[[Any], Mapping[Any, Any]] = partial(_expected, dict, "a mapping")
_text: Callable[[Any], str] = partial(_expected, str, "a string")


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number in {least} .. {most}, got {value!r:.40}")
    return value


@dataclass(frozen=True)
class Snapshot:
    """Holds one rank's state between two steps.

    ``first`` has the residuals by layer name, float32 in the layer's shape. ``ranges`` are the elements of layers
    (numbered as in ``shared.layers``) that this rank owns; ``second`` holds their server-side errors,
    concatenated. ``fields`` is the compressors' further state, as flat float32 arrays: field name -> layer name ->
    values. ``control`` is the same for the controller; each layer's values are on one rank.
    """

    rank: int
    world: int
    shared: Shared
    first: Mapping[str, Floats] = field(default_factory=dict)
    ranges: tuple[Range, ...] = ()
    second: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    fields: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)
    control: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Return the inconsistencies of the state; the list is empty if it is consistent."""
        layers, names = self.shared.layers, list(self.shared.layers)
        found = []
        for name, value in self.first.items():
            if name not in layers:
                found.append(f"residual of {name!r}, which is not one of the layers")
            elif value.shape != layers[name][0] or value.dtype != np.float32:
                found.append(
                    f"residual of {name!r} has shape {list(value.shape)} and dtype {value.dtype}, "
                    f"the layer has shape {list(layers[name][0])}"
                )
            elif not np.isfinite(value).all():
                found.append(f"residual of {name!r} is not finite")
        if sum(r.length for r in self.ranges) != self.second.size or self.second.dtype != np.float32:
            found.append(
                f"server-side errors of {self.second.size} elements ({self.second.dtype}) do not match their ranges"
            )
        elif not np.isfinite(self.second).all():
            found.append("a server-side error is not finite")
        ends: dict[int, int] = {}
        for r in sorted(self.ranges, key=lambda r: (r.layer, r.start, r.length)):
            if not 0 <= r.layer < len(names):
                found.append(f"a server-side error of layer number {r.layer}, which does not exist")
                continue
            name = names[r.layer]
            inside = 0 <= ends.get(r.layer, 0) <= r.start and r.length >= 0
            if not inside or r.end > math.prod(layers[name][0]):
                found.append(
                    f"server-side error of {name!r} from {r.start}, {r.length} elements, which do not fit"
                )
            elif r.length and name not in self.first:
                found.append(f"server-side error of {name!r}, which has no residual")
            ends[r.layer] = max(ends.get(r.layer, 0), r.end)
        for kind, values in (*self.fields.items(), *self.control.items()):
            for name, value in values.items():
                if name not in layers or value.ndim != 1 or value.dtype != np.float32:
                    found.append(f"{kind} of {name!r}, shape {list(value.shape)}, dtype {value.dtype}")
                elif not np.isfinite(value).all():
                    found.append(f"{kind} of {name!r} is not finite")
        return found


# ------------------------------------------------------------------------------------------- taken and restored


def snapshot(pipeline: Pipeline, unit: float = 1.0) -> Snapshot:
    """Copy this rank's state between two steps. Nothing is sent.

    It raises StateError while a step is open or not yet accepted. For ``unit`` see :class:`Shared`.
    """
    if pipeline.is_open or pipeline.result is not None:
        raise StateError("a step is open: the state is defined between steps only")
    pipeline.lay_out()  # as the next step would do, whose plan may give residuals to further layers
    names = [layer.name for layer in pipeline.layers]
    residuals = pipeline.residuals
    shared = pipeline.config.shared()
    return Snapshot(
        pipeline.transport.rank,
        pipeline.transport.size,
        Shared(
            pipeline.step,
            {layer.name: (layer.shape, layer.dtype) for layer in pipeline.layers},
            tuple(names[i] for i in pipeline.ordering.order),
            pipeline.plan,
            frozenset(names[i] for i in pipeline.ordering.cold),
            frozenset(names[i] for i in pipeline.ordering.sparse),
            dict(zip(names, pipeline.ordering.streak.tolist(), strict=True)),
            {name: shared[name] for name in SETTINGS},
            unit,
            pipeline.learning_rate,
            None
            if pipeline.controller is None
            else {"controller": pipeline.controller.name, "state": pipeline.controller.shared_state()},
            None if pipeline.plans.switch is None else pipeline.plans.switch.to_plain(),
        ),
        {
            layer.name: residuals.first.value(i).reshape(layer.shape).copy()
            for i, layer in enumerate(pipeline.layers)
            if layer.size and residuals.first.lengths[i]
        },
        residuals.ranges,
        np.concatenate([np.zeros(0, np.float32), *map(residuals.second.value, range(len(residuals.ranges)))]),
        {
            kind: {
                name: pipeline.fields[kind].value(i).copy()
                for i, name in enumerate(names)
                if pipeline.fields[kind].lengths[i]
            }
            for kind in pipeline.fields.names
        },
        {} if pipeline.controller is None else pipeline.controller.own_state(),
    )


def check(pipeline: Pipeline, state: Snapshot) -> None:
    """Raise one StateError that lists all in ``state`` that does not fit the pipeline, and change nothing."""
    if pipeline.is_open or pipeline.result is not None:
        raise StateError("a step is open: the state can be replaced between steps only")
    shared = state.shared
    here = {layer.name: (layer.shape, layer.dtype) for layer in pipeline.layers}
    found = [f"unknown layer {name!r}" for name in shared.layers if name not in here]
    found += [f"missing layer {name!r}" for name in here if name not in shared.layers]
    found += [
        f"misshapen layer {name!r}: {list(form[0])} {form[1]} there, {list(here[name][0])} {here[name][1]} here"
        for name, form in shared.layers.items()
        if name in here and form != here[name]
    ]
    found += state.problems()
    if not found:
        found = _missing_state(pipeline, state)
    transport = pipeline.transport
    if (state.rank, state.world) != (transport.rank, transport.size):
        found.append(
            f"state of rank {state.rank} of {state.world} on rank {transport.rank} of {transport.size}"
        )
    if found:
        raise StateError(f"the compression state does not fit: {'; '.join(found)}")


def restore(pipeline: Pipeline, state: Snapshot, unit: float = 1.0) -> None:
    """Replace the pipeline's state by ``state``. Nothing is sent; all ranks must restore states of one moment.

    Residuals in another unit than ``unit`` are converted, see :class:`Shared`. The plan in the state takes over.
    StateError is raised, with nothing changed, if anything does not fit; see :func:`check`.
    """
    check(pipeline, state)
    _say_what_differs(pipeline, state.shared)
    factor = None if unit == state.shared.unit else np.float32(state.shared.unit / unit)
    _take_over(pipeline, state, state.shared, factor)


def inherit(new: Pipeline, old: Pipeline) -> None:
    """Give ``new``, which has all of ``old``'s layers and more, the state of ``old``. Nothing is sent.

    A plan that has changed since the start is kept, and goes on to its next version with the new layers in it; a
    controller's choices are kept too. An unfinished change of compression goes on to the plan of ``new``.
    """
    state = snapshot(old)
    shared = state.shared
    names = [layer.name for layer in new.layers]
    added = [name for name in names if name not in shared.layers]
    plan = new.plan
    switch = None if shared.switch is None else {**shared.switch, "target": plan.to_json()}
    if shared.plan.version > new.plan.version or switch is not None:
        known = shared.plan.by_layer
        plan = Plan(shared.plan.version + 1, tuple(known.get(a.layer, a) for a in new.plan.assignments))
    wider = dataclasses.replace(
        shared,
        order=(*shared.order, *added),
        plan=plan,
        streaks={**dict.fromkeys(added, 0), **shared.streaks},
        switch=switch,
    )
    _take_over(new, state, wider)


def merge(states: Iterable[Snapshot], rank: int, world: int) -> Snapshot:
    """Merge the states of all ranks of a job into that of rank ``rank`` of a job of ``world`` ranks.

    With N old ranks, every new rank's residual is r' = (1/N) sum over i of (r_i + N s_i), s_i being the server-side
    error of the ranges that rank i owned: the mean over ranks of what was not applied yet stays what it was,
    whatever the new number. Fields become their mean, so those that are the same on all ranks stay what they are. A
    controller's sums go to the layers' new owners. Sums are in float64, in rank order. ``states`` is consumed one
    at a time. StateError is raised if they do not belong together.
    """
    totals: dict[str, npt.NDArray[np.float64]] = {}
    fields: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    holders: Counter[tuple[str, str]] = Counter()
    control: dict[str, dict[str, Floats]] = {}
    shared: Shared | None = None
    count = 0
    for count, state in enumerate(states, 1):
        if found := state.problems():
            raise StateError(f"the state of rank {state.rank} does not fit together: {'; '.join(found)}")
        if state.rank != count - 1 or (shared is not None and state.shared.to_plain() != shared.to_plain()):
            raise StateError(f"the state of rank {state.rank} is not of the same job and step")
        shared = state.shared
        names = list(shared.layers)
        for name, value in state.first.items():
            total = totals.setdefault(name, np.zeros(value.shape, dtype=np.float64))
            total += value
        for kind, values in state.fields.items():
            sums = fields.setdefault(kind, {})
            for name, value in values.items():
                if sums.setdefault(name, np.zeros(value.shape, dtype=np.float64)).shape != value.shape:
                    raise StateError(f"{kind} of {name!r} has another size on rank {state.rank}")
                sums[name] += value
                holders[kind, name] += 1
        for kind, values in state.control.items():
            control.setdefault(kind, {}).update(values)
        at = 0
        for r in state.ranges:
            if r.length:
                total = totals[names[r.layer]].reshape(-1)
                total[r.start : r.end] += float(state.world) * state.second[at : at + r.length]
            at += r.length
    if shared is None:
        raise StateError("no state to take over")
    rare = [f"{kind} of {name!r}" for (kind, name), number in holders.items() if number != count]
    if rare:
        raise StateError(f"not all ranks have {', '.join(rare)}")
    return Snapshot(
        rank,
        world,
        shared,
        _means(totals, count),
        fields={kind: _means(sums, count) for kind, sums in fields.items()},
        control=control,
    )


#: State that each rank has of its own, which a rank that comes later begins at zero. All other fields are equal on all
#: ranks, so it takes them over; but EF21's estimates of a rank's gradient become their mean, which all ranks know.
_OWN_FIELDS = frozenset({MOMENTUM, EF21_MOMENTUM})


def regroup(
    state: Snapshot, rank: int, world: int, kept: Iterable[str], control: Mapping[str, Mapping[str, Floats]]
) -> Snapshot:
    """Return what a survivor of ``state``, or a newcomer of its :func:`outline`, goes on with as a rank of ``world``.

    r' = r + N' s, with this rank's residual r, its server-side error s and the new number of ranks N': a residual is
    one of N' summands of the next mean, a server-side error belongs to the mean itself. EF21's g_i becomes g, so that
    g is the mean of g_i over any ranks. ``kept`` names the layers with residuals; a newcomer's are zero. ``control``
    has the controller's arrays of all survivors.
    """
    names, at = list(state.shared.layers), 0
    first: dict[str, Floats] = {}
    for name in kept:
        residual = state.first.get(name)
        zeros = np.zeros(state.shared.layers[name][0], np.float32)
        first[name] = zeros if residual is None else residual.copy()
    for r in state.ranges:
        if names[r.layer] in first:
            residual = first[names[r.layer]].reshape(-1)
            residual[r.start : r.end] += np.float32(world) * state.second[at : at + r.length]
        at += r.length
    fields = {kind: dict(values) for kind, values in state.fields.items()}
    if EF21_OWN in fields:
        fields[EF21_OWN] = dict(fields[EF21_MEAN])
    return Snapshot(rank, world, state.shared, first, fields=fields, control=control)


def outline(state: Snapshot) -> Snapshot:
    """Return what a newcomer needs of a survivor's state: no residuals, and other state of one rank at zero."""
    fields = {
        kind: {name: np.zeros_like(value) for name, value in values.items()}
        if kind in _OWN_FIELDS
        else values
        for kind, values in state.fields.items()
    }
    return Snapshot(state.rank, state.world, state.shared, fields=fields)


def _means(totals: Mapping[str, npt.NDArray[np.float64]], count: int) -> dict[str, Floats]:
    return {name: np.asarray(total / count, dtype=np.float32) for name, total in totals.items()}


def _missing_state(pipeline: Pipeline, state: Snapshot) -> list[str]:
    """Return the state that the saved plan requires and the snapshot does not contain."""
    shared = state.shared
    numbers = {layer.name: i for i, layer in enumerate(pipeline.layers)}
    try:
        order = [numbers[name] for name in shared.order if name not in shared.sparse]
        layout = build_layout(
            pipeline.layers, shared.plan, order, frozenset(), pipeline.config.slice_elements
        )
    except GradcompError as error:
        return [f"its plan cannot be carried out: {error}"]
    sizes = layout.residual_sizes(pipeline.layers)
    compressors = compressors_of(pipeline.layers, shared.plan)
    wanted = fields_of(pipeline.layers, compressors, pipeline.config.seed, pipeline.transport.size)
    missing = [
        f"missing {kind} of {layer.name!r}"
        for layer, fields in zip(pipeline.layers, wanted, strict=True)
        for kind, (size, begin) in fields.items()
        if size and not _fits(kind, state.fields.get(kind, {}).get(layer.name), size, begin)
    ]
    return missing + [
        f"missing residual of {layer.name!r}"
        for layer, size in zip(pipeline.layers, sizes, strict=True)
        if size and layer.name not in state.first
    ]


def _fits(kind: str, saved: Floats | None, size: int, begin: Begin) -> bool:
    """Return whether a saved field has the right length, or was kept by another number of ranks."""
    if saved is None or saved.size == size or not (saved.size and kind.startswith(SHARED)):
        return saved is not None and saved.size == size
    try:
        return begin(saved).size == size
    except StateError:
        return False


def _say_what_differs(pipeline: Pipeline, shared: Shared) -> None:
    settings = pipeline.config.shared()
    if (slices := _saved_slices(pipeline, shared)) is not None:
        settings["slice_elements"] = slices
    changes = [(name, was) for name, was in shared.settings.items() if settings[name] != was]
    if changes:
        logger.warning(
            "settings differ from the saved ones (%s): the run goes on, but not bit for bit as it would have",
            "; ".join(f"{name} is {settings[name]}, was {was}" for name, was in changes),
        )
    if shared.plan.version == pipeline.plan.version:
        mine = pipeline.plan.by_layer
        changed = [a for a in shared.plan.assignments if mine[a.layer] != a]
        if changed:
            logger.warning(
                "the saved plan takes over: %d layers are not compressed as this program says, the first is %r "
                "(%s, level %s)",
                len(changed),
                changed[0].layer,
                changed[0].compressor,
                changed[0].level,
            )


def _take_over(pipeline: Pipeline, state: Snapshot, shared: Shared, factor: np.float32 | None = None) -> None:
    """Replace the pipeline's state by residuals, times ``factor``, and ``shared``."""
    numbers = {layer.name: i for i, layer in enumerate(pipeline.layers)}
    sizes = [0] * len(numbers)
    for name, value in state.first.items():
        sizes[numbers[name]] = value.size
    residuals = pipeline.residuals.like(sizes)
    names = list(state.shared.layers)
    residuals.own([dataclasses.replace(r, layer=numbers[names[r.layer]]) for r in state.ranges], state.world)
    rows = [(residuals.first, numbers[name], value.reshape(-1)) for name, value in state.first.items()]
    ends = np.cumsum([r.length for r in state.ranges], dtype=np.int64)
    seconds = np.split(state.second, ends)[: len(state.ranges)]
    rows += [(residuals.second, row, value) for row, value in enumerate(seconds)]
    fields = Fields(len(numbers), pipeline.device.zeros)
    for kind, by_name in state.fields.items():
        fields.put(kind, {numbers[name]: value.copy() for name, value in by_name.items()})
        if not kind.startswith(SHARED):
            rows += [(fields[kind], numbers[name], value) for name, value in by_name.items()]
    for buffer, row, value in rows:
        buffer.set(row, value if factor is None else value * factor)
    _restore_controller(pipeline, state, shared)
    saved = shared.switch
    switch = None if saved is None else Switch.from_plain(saved, pipeline.layers, shared.step)
    # Server-side errors of ranges that this rank does not own here go into its residuals.
    pipeline.restore(
        shared.step,
        shared.plan,
        [numbers[name] for name in shared.order],
        cold=frozenset(numbers[name] for name in shared.cold),
        sparse=frozenset(numbers[name] for name in shared.sparse),
        streak=[shared.streaks[layer.name] for layer in pipeline.layers],
        residuals=residuals,
        fields=fields,
        learning_rate=shared.rate,
        switch=switch,
        slice_elements=_saved_slices(pipeline, shared),
    )


def _saved_slices(pipeline: Pipeline, shared: Shared) -> int | None:
    """Return the saved size of exchange buckets if it takes over: where the ranks chose theirs, by a measured rate.

    A size for gradients on GPUs does not suit those on a host, and the other way round, so it does not take over there.
    """
    own, saved = pipeline.config.slice_elements, int(shared.settings["slice_elements"])
    if saved == own or not pipeline.slices_chosen or max(own, saved) > HOST_SLICE or saved < 8:
        return None
    return saved


def _restore_controller(pipeline: Pipeline, state: Snapshot, shared: Shared) -> None:
    """Restore the controller's state if it was saved by the same controller, else warn."""
    controller, saved = pipeline.controller, shared.control
    if controller is not None and saved is not None:
        if saved["controller"] == controller.name:
            controller.restore(_mapping(saved["state"]), state.control)
        else:
            logger.warning(
                "the saved controller was %s, this one is %s, which begins anew",
                saved["controller"],
                controller.name,
            )
    elif controller is not None or saved is not None:
        logger.warning(
            "the saved run had %s controller, this one has %s: the saved plan goes on from there",
            "no" if saved is None else f"the {saved['controller']}",
            "none" if controller is None else f"the {controller.name}",
        )
