"""Simulates N ranks of one model in one thread: random polling orders, delays and faults, repeatable by seed.

    ranks = Simulation(layers, Quantize(4), world=3, shuffle=True, delay=0.5, slice_elements=64)
    outcome = ranks.step(ranks.gradients())
    outcome.mean(0)                     # of layer 0; fails unless all ranks hold the same bytes

Gradients are ``[rank][layer]`` lists of flat arrays; ``None`` stands for no gradient and ``SPARSE`` for a sparse one.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from gradcomp import Compressor, Config, Filter, Identity, LayerSpec, Plan, Policy
from gradcomp.compress.policy import assign
from gradcomp.control import Controller, ControllerRun, Environment
from gradcomp.control.base import Background, at_once
from gradcomp.core.scheme import parse
from gradcomp.core.state import Range
from gradcomp.core.topology import Topology
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.fingerprint import NOTHING
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.preemption import Preemption
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.step import StepResult
from gradcomp.kernels.devices import HOST, Device
from gradcomp.reduce.model import Network
from gradcomp.testing.recording import RecordingTransport
from gradcomp.transport.base import Transport
from gradcomp.transport.inprocess import World

SPARSE = "sparse"

Gradient = Any  # a flat array, None or SPARSE
Gradients = list[list[Gradient]]
Mean = Any  # a flat array or None
Array = np.ndarray[Any, Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}

_UNTOUCHED = 777.0  # fills a newly allocated output, so that an unwritten mean is noticed
_POLLS = 200_000  # per step; more than any test needs


def plan_for(layers: Sequence[LayerSpec], compressor: Compressor, version: int = 0) -> Plan:
    """Returns a plan that gives every layer, however small, this compressor.

    Only float64 layers, which no codec takes, get Identity.
    """
    chosen = [Identity() if layer.dtype == "float64" else compressor for layer in layers]
    rows = zip(layers, chosen, strict=True)
    return Plan(version, tuple(assign(layer.name, c) for layer, c in rows))


def random_gradients(layers: Sequence[LayerSpec], world: int, seed: int = 0, size: float = 1.0) -> Gradients:
    """Returns normal numbers with this standard deviation, drawn separately for each rank."""
    generator = np.random.default_rng(seed)
    return [
        [(size * generator.standard_normal(layer.size)).astype(DTYPES[layer.dtype]) for layer in layers]
        for _ in range(world)
    ]


def true_mean(gradients: Gradients, layer: int) -> Mean:
    """Returns the mean over all ranks in float64, absent gradients counting as zero; None if no rank has one."""
    present = [rank[layer].astype(np.float64) for rank in gradients if isinstance(rank[layer], np.ndarray)]
    return sum(present) / len(gradients) if present else None


@dataclass(frozen=True)
class Outcome:
    """A finished step. ``means[rank][layer]`` is None if nothing was written."""

    means: list[list[Mean]]
    results: list[StepResult]
    committed: list[bool]

    def mean(self, layer: int) -> Mean:
        """Returns the layer's mean; all ranks must hold the same bytes."""
        return self.all_means()[layer]

    def all_means(self) -> list[Mean]:
        """Returns every layer's mean; all ranks must hold the same bytes."""
        first = self.means[0]
        for rank, means in enumerate(self.means):
            for layer, (mine, theirs) in enumerate(zip(means, first, strict=True)):
                assert same_bytes(mine, theirs), f"layer {layer} differs between rank 0 and rank {rank}"
        return first

    @property
    def result(self) -> StepResult:
        """Returns the result of the step, on which all ranks must agree."""
        first = self.results[0]
        for other in self.results:
            for name in ("present", "sparse", "nonfinite"):
                assert np.array_equal(getattr(other, name), getattr(first, name)), f"ranks disagree on {name}"
        return first


def same_bytes(a: Array | None, b: Array | None) -> bool:
    """Returns true if the bytes are equal, or both arrays are absent."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def shared(driver: Any, size: int, dtype: Any = np.float32) -> Any:
    """Returns zeros that a device's kernels and this process can access at the same address.

    A GPU's are managed memory, which this process may access only while no kernel runs.
    """
    nbytes = size * np.dtype(dtype).itemsize
    if hasattr(driver, "shared"):
        return driver.shared(nbytes).view(dtype)
    import cupy

    memory = cupy.cuda.malloc_managed(max(nbytes, 1))
    whole: Any = (ctypes.c_uint8 * max(nbytes, 1)).from_address(memory.ptr)
    whole.memory = memory  # keeps the memory alive as long as any view of it
    view = np.frombuffer(whole, np.uint8)[:nbytes]
    view[:] = 0
    return view.view(dtype)


@dataclass
class Rank:
    """One rank: its pipeline, and the means of the current step."""

    layers: Sequence[LayerSpec]
    plan: Plan
    transport: Any  # a Transport; a recording one has ``sent``
    config: Config
    settings: Settings
    outputs: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.settings.device
        self.pipeline = Pipeline(
            self.layers, self.plan, self.transport, self.config, self._allocate, self.settings
        )

    def _allocate(self, layer: int) -> int:
        assert layer not in self.outputs, f"memory for layer {layer} was requested twice"
        self.outputs[layer] = self._memory(layer)
        self.outputs[layer][:] = _UNTOUCHED
        return self.outputs[layer].ctypes.data

    def submit(self, layer: int, gradient: Gradient) -> None:
        """Submits one layer; the mean replaces a copy of the gradient, in place."""
        if gradient is None or isinstance(gradient, str):
            self.pipeline.arrivals.submit_absent(layer, sparse=gradient == SPARSE)
            return
        assert gradient.dtype == DTYPES[self.layers[layer].dtype]
        assert gradient.ndim == 1
        out = self._memory(layer)
        out[:] = gradient
        self.outputs[layer] = out
        event = self.device.mark(layer)
        self.pipeline.arrivals.submit(Submission(layer, out.ctypes.data, out.ctypes.data, out, event))

    def _memory(self, layer: int) -> Any:
        size, dtype = self.layers[layer].size, DTYPES[self.layers[layer].dtype]
        driver = self.device.driver
        return np.zeros(size, dtype) if driver is None else shared(driver, size, dtype)


class Simulation:
    """N ranks in one process.

    ``seed`` seeds the simulated timing, ``config_seed`` gradcomp's own draws. ``shuffle``: ranks take turns at random,
    submit layers in different orders and poll in between. ``delay``: the probability that a finished collective is not
    seen at a poll. ``record``: ``transport.sent`` records what each rank sends. ``average=False``: sums instead of
    means. ``topology``: the hosts of the ranks; ``network``: the link by which ``auto`` chooses a reduction.
    ``controller`` changes levels, and works in ``background``. ``devices``: the device of each rank, by default the
    host. ``transports`` replace the simulated ones. ``settings`` go to :class:`Config`.
    The attribute ``rate`` is the learning rate of the next steps, 0 if not known; ``fingerprints`` are the ranks'.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        compression: Compressor | Plan | Policy,
        world: int = 2,
        *,
        seed: int = 0,
        config_seed: int = 0,
        shuffle: bool = False,
        delay: float = 0.0,
        tamper: Callable[[int, int, Array], Array] | None = None,
        record: bool = False,
        average: bool = True,
        topology: Topology | None = None,
        network: Network | None = None,
        controller: Controller | None = None,
        background: Background = at_once,
        devices: Sequence[Device] = (),
        transports: Sequence[Transport] = (),
        **settings: Any,
    ) -> None:
        # A test that tampers with messages wants to get past the checksums.
        settings.setdefault("checksums", tamper is None)
        self.layers = list(layers)
        self.size = world
        self.random = random.Random(seed)  # noqa: S311 - for simulated timing
        self.shuffle = shuffle
        hold = (lambda rank, number, polls: self.random.random() < delay) if delay else None
        self.world = World(world, delay=hold, tamper=tamper)
        transports = transports or (
            [RecordingTransport(self.world, rank) for rank in range(world)]
            if record
            else self.world.transports()
        )
        schedule, policy = None, None
        if isinstance(compression, Compressor):
            # All layers are compressed, however small, except float64 ones, which no codec takes.
            everything = Filter(min_elements=0, min_dimensions=0, exclude_kinds=())
            compression = Policy(compression, filter=everything)
        if isinstance(compression, Policy):
            policy, schedule = compression, compression.scheduled(layers)
            compression = compression.plan(layers)
        config = Config(seed=config_seed, **settings)
        running: list[ControllerRun | None] = [None] * world
        places = devices or [HOST] * world
        if controller is not None:
            assert policy is not None, "a controller changes the levels of a policy"
            adjustable, hosts = policy.adjustable(layers), topology or Topology.one_host(world)
            common = (parse(config.reduction), config_seed, policy.last_change, background)
            exact = config.deterministic
            running = [
                controller.begin(
                    Environment(layers, adjustable, r, hosts, *common, device=p, deterministic=exact)
                )
                for r, p in enumerate(places)
            ]
        shared_settings = Settings(average=average, schedule=schedule, topology=topology, network=network)
        self.ranks = [
            Rank(
                self.layers,
                compression,
                transport,
                config,
                replace(shared_settings, controller=run, device=device, preemption=Preemption()),
            )
            for transport, run, device in zip(transports, running, places, strict=True)
        ]
        self.pipelines = [rank.pipeline for rank in self.ranks]
        self.rate = 0.0
        self.fingerprints = [NOTHING] * world
        self.drawn = 0

    # -- stepping -----------------------------------------------------------------------------------------------

    def gradients(self, absent: Sequence[int] = (), size: float = 1.0) -> Gradients:
        """Returns new random gradients at every call; no rank has the ``absent`` layers."""
        self.drawn += 1
        drawn = random_gradients(self.layers, self.size, seed=self.drawn, size=size)
        return [[None if i in absent else g for i, g in enumerate(rank)] for rank in drawn]

    def step(self, gradients: Gradients | None = None, *, commit: bool = True, **options: Any) -> Outcome:
        """Runs one exchange on all ranks; raises the first rank's error. Options are those of :meth:`attempt`."""
        errors = self.attempt(gradients, **options)
        if error := next(filter(None, errors), None):
            raise error
        means = [[rank.outputs.get(i) for i in range(len(self.layers))] for rank in self.ranks]
        results = [p.result for p in self.pipelines if p.result is not None]
        committed = [commit and p.commit() for p in self.pipelines]
        if not commit:
            for p in self.pipelines:
                p.discard()
        return Outcome(means, results, committed)

    def attempt(
        self,
        gradients: Gradients | None = None,
        *,
        scale: float = 1.0,
        order: Sequence[int] | None = None,
        during: Callable[[], None] | None = None,
        dying: Sequence[int] = (),
        last: bool = False,
    ) -> list[Exception | None]:
        """Runs one exchange and returns every rank's error or None. A rank that raised leaves the world.

        ``order`` is the order of the layers (default: last first, as in backward); ``during`` is called at every turn.
        Ranks in ``dying`` leave the world after a few turns, without an error of their own. If the exchange is the
        ``last``, every rank leaves after it, so that a rank which waits for one more round finds that out.
        """
        gradients = self.gradients() if gradients is None else gradients
        errors: list[Exception | None] = [None] * self.size
        turns = {r: deque(self._turns(r, gradients[r], scale, order)) for r in range(self.size)}
        last_words = {r: self.random.randrange(3, 12) for r in dying}
        active = list(range(self.size))
        for _ in range(_POLLS):
            if not active:
                return errors
            if self.shuffle:
                r = self.random.choice(active)
            else:
                active.append(r := active.pop(0))
            if during is not None:
                during()
            try:
                if r in last_words:
                    last_words[r] -= 1
                    if last_words[r] < 0:
                        self.world.kill(r)
                        active.remove(r)
                        continue
                if turns[r] and (not self.shuffle or self.random.random() < 0.5):
                    turns[r].popleft()()
                else:
                    pipeline = self.pipelines[r]
                    # The engine's thread polls only this collective too, while a step waits for it.
                    if pipeline.awaited is None or pipeline.awaited.poll():
                        pipeline.poll()
                    if not pipeline.is_open and not turns[r]:
                        active.remove(r)
                        if last:
                            self.world.kill(r)
            except Exception as error:  # noqa: BLE001  (the test judges the error)
                errors[r] = error
                self.pipelines[r].let_go()
                self.world.kill(r)
                active.remove(r)
        raise AssertionError(f"no progress; ranks {active} are at {[p.position for p in self.pipelines]}")

    def _turns(
        self, r: int, gradients: Sequence[Gradient], scale: float, order: Sequence[int] | None
    ) -> list[Callable[[], None]]:
        rank = self.ranks[r]
        rank.outputs.clear()
        if order is None:
            order = list(reversed(range(len(self.layers))))
            if self.shuffle:
                self.random.shuffle(order)
        # A layer without a gradient is submitted as absent, or only noticed at the flush.
        silent = [i for i in order if gradients[i] is None and self.random.random() < 0.5]
        return [
            lambda: rank.pipeline.open(scale, self.rate, fingerprint=self.fingerprints[r]),
            *[partial(rank.submit, i, gradients[i]) for i in order if i not in silent],
            rank.pipeline.flush,
        ]

    # -- state --------------------------------------------------------------------------------------------------

    def owed(self, layer: int) -> Array:
        """Returns the sum not yet applied: the mean of the residuals plus the server-side errors, in float64."""
        total = np.zeros(self.layers[layer].size)
        for pipeline in self.pipelines:
            residuals = pipeline.residuals
            if (first := residuals.first.value(layer)).size:
                total += first.astype(np.float64) / self.size
            for row, owned in enumerate(residuals.ranges):
                if owned.layer == layer:
                    total[owned.start : owned.end] += residuals.second.value(row)
        return total

    def state(self) -> list[tuple[list[bytes], dict[Range, bytes]]]:
        """Returns every rank's residuals and other state by layer, to compare."""
        found = []
        for p in self.pipelines:
            buffers = [p.residuals.first, *(p.fields[name] for name in sorted(p.fields.names))]
            by_layer = [b"".join(b.value(i).tobytes() for b in buffers) for i in range(len(self.layers))]
            second = {r: p.residuals.second.value(row).tobytes() for row, r in enumerate(p.residuals.ranges)}
            found.append((by_layer, second))
        return found
