"""The device on which gradients are exchanged: gradients reach its memory, and means come back, without waits."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.kernels import devices
from gradcomp.kernels.cuda import driver
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.layers import Named
from gradcomp.torch.streams import Streams, streams_of
from gradcomp.torch.tensors import Form, has_memory
from gradcomp.torch.tensors import form as form_of

logger = logging.getLogger("gradcomp")
_KIND = attrgetter("dtype", "shape", "device", "layout")


class _Lent:
    """A block that goes back to the allocator with the last reference to it."""

    def __init__(self, address: int) -> None:
        self.address = address
        # PyTorch frees everything itself at exit.
        weakref.finalize(self, torch.cuda.caching_allocator_delete, address).atexit = False


class TorchPool:
    """Implements :class:`gradcomp.kernels.cuda.driver.Pool` by PyTorch's allocator."""

    def __init__(self, index: int) -> None:
        self._index = index

    def allocate(self, nbytes: int, stream: int) -> _Lent:
        """Allocate from the blocks that PyTorch keeps for this stream."""
        try:
            return _Lent(int(torch.cuda.caching_allocator_alloc(max(nbytes, 1), self._index, stream)))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def release(self) -> None:
        torch.cuda.empty_cache()

    def describe(self) -> str:
        held, used = torch.cuda.memory_reserved(self._index), torch.cuda.memory_allocated(self._index)
        return f"PyTorch's allocator holds {held} bytes, {used} of them in use"


def device_of(named: Named) -> Device:
    """Return the one device of all parameters, or the host if there are none.

    Without CuPy and cuda-bindings, gradients of a GPU are exchanged in the host's memory, and a warning says so.
    Raises ConfigError for several devices, and for one that is neither the CPU nor a CUDA device.
    """
    found = sorted({str(parameter.device) for _, parameter in named})
    if not found or found == ["cpu"]:
        return HOST
    if len(found) > 1:
        raise ConfigError(
            f"the optimizer's parameters are on {', '.join(found)}; one optimizer exchanges gradients of one device"
        )
    device = torch.device(found[0])
    if device.type != "cuda":
        raise ConfigError(
            f"gradients on {found[0]} cannot be exchanged: move the model to the CPU or to a CUDA device"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        driver.lend(index, TorchPool(index))
        return devices.cuda(index)
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        _warn(
            f"{error}; until then they are copied to pinned memory and exchanged by the CPU's kernels: slower, "
            "with the same means"
        )
        return staged(torch.device("cuda", index))


@cache
def _warn(text: str) -> None:
    """Warn once for each text, however many optimizers there are."""
    logger.warning("%s", text)


class Handed(NamedTuple):
    """A gradient that the engine has: ``tensor`` holds its values once ``event`` is reached, and later its mean.

    This object keeps the memory of both alive. ``gradient`` is the gradient's own tensor, which the mean is
    written to in the end; None if there is none yet.
    """

    tensor: torch.Tensor
    event: Any
    gradient: torch.Tensor | None


class InPlace:
    """Kernels read gradients, and write means, where they lie: on the CPU, or on a device that has kernels.

    A gradient's memory cannot be reused meanwhile, because the engine holds the tensors until the exchange
    ends. Gradients reach the kernels, and means the script, each in the order of the script's stream.
    """

    def __init__(self, device: Device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._scripts: Any = None  # the stream on which the script trains
        self._ours: Any = None if device.driver is None else streams.external(device.driver.stream)

    @property
    def is_late(self) -> bool:
        """Return True if work on a gradient may still run when its hook is called."""
        return self._device.is_late

    def open(self) -> None:
        """Begin an exchange on one of the script's threads, and remember its current stream as the script's.

        Raises StateError while that stream is captured into a graph.
        """
        self._streams.refuse_capture()
        self._scripts = self._streams.current()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """Take a gradient whose memory is dense; the event follows the work that computes it."""
        driver = self._device.driver
        return Handed(gradient, None if driver is None else driver.mark(self._streams.handle()), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Return memory for a mean of this form: the gradient, if there is one, or zeros made on the script's stream.

        It may run on any thread. The kernels write the mean after the work on the script's stream, which last zeroed
        the gradient and will use its memory again.
        """
        with self._streams.on(self._scripts):
            if gradient is None:
                gradient = form.empty().zero_()
            self._device.follow([self._device.mark(self._streams.handle())])
        return Handed(gradient, None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """Make later work of the current stream see the means: it waits for the kernels' stream."""
        if self._ours is not None:
            with self._streams.on(self._ours):
                event = self._streams.mark()
            self._streams.follow(event)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """Return the tensor with the mean for which ``made`` was allocated, in order as for :meth:`give_back`."""
        return made.tensor

    def aside(self) -> AbstractContextManager[Any]:
        """Make a stream current that follows the means and waits for no work of the script's."""
        return self._streams.on(self._ours)


class ThroughHost:
    """Gradients on a GPU are copied to pinned memory, on which the host's kernels work.

    Copies to the host run on a separate stream, ordered after the stream that computes the gradient. A copy
    therefore does not delay the script's next kernel, and waits only for its own gradient. Copies back run on
    the caller's current stream, or on a separate one under :meth:`aside`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.another(), streams.another()

    def open(self) -> None:
        """Refuse graph capture; no stream is remembered, because other threads start nothing on the script's."""
        self._streams.refuse_capture()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """Copy the gradient to the host; the event follows the copy."""
        streams = self._streams
        host = streams.pinned(gradient.numel(), gradient.dtype)
        computed = streams.mark()
        with streams.on(self._down):
            streams.follow(computed)
            streams.copy(host, gradient)
            return Handed(host, streams.mark(), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Allocate the mean's memory on the host only; :meth:`finished` allocates a gradient."""
        return Handed(self._streams.pinned(form.shape.numel(), form.dtype), None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """Copy the means to the device on the current stream."""
        for each in handed:
            assert each.gradient is not None, "it was handed in"
            self._streams.copy(each.gradient, each.tensor)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """Copy the mean to its gradient, or to a new one, on the current stream."""
        gradient = form.empty() if made.gradient is None else made.gradient
        self._streams.copy(gradient, made.tensor)
        return gradient

    def aside(self) -> AbstractContextManager[Any]:
        """Make the stream for copies to the device current."""
        return self._streams.on(self._up)


@dataclass(frozen=True)
class Staged(Device):
    """A device without kernels, whose gradients the engine sees as the host's, with events to wait for."""

    streams: Streams | None = None

    @cached_property
    def is_late(self) -> bool:
        """Return True, because copies take time."""
        return True

    def reached(self, events: Iterable[Any]) -> bool:
        """Return True if the copies have ended."""
        assert self.streams is not None, "staged() names them"
        return all(event is None or self.streams.reached(event) for event in events)


def staged(device: torch.device) -> Device:
    return Staged(str(device), streams=streams_of(device))


Staging = InPlace | ThroughHost


def staging_for(device: Device, of: torch.device) -> Staging:
    """Return the staging of gradients on torch's device ``of``, where ``device`` is the engine's."""
    if isinstance(device, Staged) and device.streams is not None:
        return ThroughHost(device.streams)
    return InPlace(device, streams_of(of))


class Gradients:
    """The ``.grad`` of parameters, by layer number; :meth:`attach` must be called first.

    With ``sparse_as_dense`` sparse gradients travel as dense ones, see :meth:`restore_sparse`.
    """

    def __init__(self, named: Named, *, sparse_as_dense: bool) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._forms = [Form.of(parameter) for parameter in self.parameters]
        self._kinds = [(form.dtype, form.shape, form.device, torch.strided) for form in self._forms]
        self._strides = [form.strides for form in self._forms]
        self._sparse_as_dense = sparse_as_dense
        #: Layers of which this rank has had a sparse gradient that travelled as a dense one.
        self.made_dense: set[int] = set()
        #: That of a rank which exchanges nothing, until :meth:`attach`.
        self._staging: Staging = InPlace(HOST, streams_of(torch.device("cpu")))
        self._handed: dict[int, Handed] = {}
        self.made: dict[int, Handed] = {}  # memory for means of layers without a gradient on this rank

    def attach(self, device: Device) -> None:
        """Choose how gradients reach the engine, whose kernels run on ``device``."""
        self._staging = staging_for(device, self.parameters[0].device)

    def open(self) -> None:
        self._staging.open()
        self._handed = {}

    def own(self, layers: Sequence[int]) -> list[torch.Tensor]:
        """Return the layers' gradients, made dense in memory unless they travel as rows.

        Raises StateError if a gradient's shape, dtype or device differs from the parameter's at wrapping.
        """
        found = [self.parameters[layer].grad for layer in layers]
        # The usual case is checked for all layers together, since a call for each would take several times as long.
        if (
            set(map(type, found)) == {torch.Tensor}
            and list(map(_KIND, found)) == [self._kinds[layer] for layer in layers]
            and list(map(torch.Tensor.stride, found)) == [self._strides[layer] for layer in layers]  # type: ignore[arg-type]
        ):
            return found  # type: ignore[return-value]
        return [self._own(layer) for layer in layers]

    def _own(self, layer: int) -> torch.Tensor:
        parameter, form = self.parameters[layer], self._forms[layer]
        gradient = parameter.grad
        if gradient is None:
            raise self.taken_away(layer)
        if not form.fits(gradient):
            raise self._became_another(layer, gradient)
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                return gradient
            self.made_dense.add(layer)
            gradient = gradient.to_dense()
        if gradient.stride() != form.strides:
            gradient = form.empty().copy_(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return gradient

    def hand_in(self, layer: int, gradient: torch.Tensor) -> Handed:
        """Return the memory on which the engine works in place of this gradient."""
        handed = self._handed[layer] = self._staging.hand_in(gradient.detach())
        return handed

    @property
    def are_ready(self) -> bool:
        """Return True if kernels can read gradients at once, where they lie: on the CPU."""
        return isinstance(self._staging, InPlace) and not self._staging.is_late

    def allocate(self, layer: int, *, apart: bool = False) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread).

        With ``apart`` it is never the gradient's own memory.
        """
        parameter, form = self.parameters[layer], self._forms[layer]
        gradient = parameter.grad
        if gradient is not None and (apart or gradient.is_sparse or gradient.stride() != form.strides):
            gradient = None
        if not (form.fits(parameter) and (gradient is None or form.fits(gradient))):
            misfit = gradient if gradient is not None and form.fits(parameter) else parameter
            raise self._became_another(layer, misfit)
        self.made[layer] = self._staging.allocate(form, None if gradient is None else gradient.detach())
        return self.made[layer].tensor.data_ptr()

    def give_back(self) -> None:
        """End the step: the gradients that were submitted hold their means now."""
        handed, self._handed = self._handed, {}
        self._staging.give_back(handed.values())

    def take_means(self) -> None:
        """Set the gradients of layers that only other ranks had to their means."""
        made, self.made = self.made, {}
        for layer, mean in made.items():
            self.parameters[layer].grad = self._staging.finished(mean, self._forms[layer])

    def restore_sparse(self, layers: Iterable[int]) -> None:
        """Make the means of these layers sparse, because SparseAdam takes no dense gradients."""
        for layer in layers:
            mean = self.parameters[layer].grad
            if mean is not None:  # a hook has taken it away otherwise, which the caller reports
                self.parameters[layer].grad = mean.to_sparse(1)

    def described(self) -> str:
        """Return a text that changes with the gradients, except where every norm and sum stays the same."""
        gradients = [parameter.grad for parameter in self.parameters]
        return repr([(float(g.norm()), float(g.sum())) for g in gradients if g is not None])

    def taken_away(self, layer: int) -> StateError:
        """Return the error for a gradient that became None before its exchange ended."""
        return StateError(
            f"the gradient of layer {self.names[layer]!r} was set to None inside backward(), perhaps by a "
            "register_post_accumulate_grad_hook() that updates the parameter there. Until backward() returns, a "
            "gradient is this rank's alone and its mean is being exchanged: remove the hook, and call step() after "
            "backward()"
        )

    def _became_another(self, layer: int, tensor: torch.Tensor) -> StateError:
        kind = "" if has_memory(tensor) else f"a {type(tensor).__name__}, "
        return StateError(
            f"layer {self.names[layer]!r} was {self._forms[layer]} when the optimizer was wrapped; its gradient is "
            f"{kind}{form_of(tensor)}, {tensor.layout}, on {tensor.device} now: wrap the optimizer when the model has "
            "its final dtype, shapes and device, and let hooks keep dtype, shape and device of gradients"
        )
