"""Parameters as layers: specs, digests, samples, rows of sparse gradients, and exchanges that take layers over."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import Kind, LayerSpec
from gradcomp.exchange.driver import Array, Rows
from gradcomp.exchange.fingerprint import CRC32C, NO_SAY, NOTHING, DeferredFingerprint, Digests, Fingerprint
from gradcomp.exchange.thread import in_background
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.reference_checksum import Words, sampled_elements, value_of_sample
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT
from gradcomp.torch.streams import streams_of
from gradcomp.torch.tensors import Form, dense_problem, dtype_name, is_dtensor

Named = list[tuple[str, torch.nn.Parameter]]

_NORM = re.compile(r"(^|[._])(norm|ln|bn|layernorm|batchnorm|groupnorm|rmsnorm)", re.IGNORECASE)

logger = logging.getLogger("gradcomp")
#: Advice that ends the error about ranks of which only some stepped.
SKIP_TOGETHER = (
    ', or let a rank that gives up skip the step everywhere by DistributedOptimizer(on_skip="agree")'
)
#: Live exchanges in the order in which they were made, which is the same on all ranks. References are weak.
_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
_numbers = count()


def spec(name: str, parameter: torch.Tensor) -> LayerSpec:
    """Return a parameter's spec.

    Its shape is in memory order, so that ranks notice when their memory layouts differ.
    """
    if problem := _sharded(parameter) or dense_problem(parameter):
        raise ConfigError(f"layer {name!r}: {problem}")
    if parameter.dtype.is_complex:
        raise ConfigError(f"layer {name!r} is complex; register its view_as_real form")
    # Dimensions from slowest to fastest in memory.
    order = sorted(range(parameter.dim()), key=lambda d: (-int(parameter.stride()[d]), d))
    shape = tuple(parameter.shape if parameter.is_contiguous() else (parameter.shape[d] for d in order))
    return LayerSpec(name, shape, dtype_name(parameter.dtype), kind_of(name, parameter.dim()))


def specs(named: Named) -> list[LayerSpec]:
    """Return the parameters' specs; raise ConfigError for one that cannot be exchanged."""
    return [spec(name, parameter) for name, parameter in named]


def _sharded(parameter: torch.Tensor) -> str | None:
    """Return why a parameter that is split over ranks cannot be exchanged, or None if it is not split."""
    if is_dtensor(parameter):
        return (
            "a DTensor, as fully_shard and tensor parallelism make them, which reduce its gradients themselves. "
            "After fully_shard, call gradcomp.torch.compress_fsdp(model); else leave these parameters out"
        )
    if getattr(parameter, "_fsdp_flattened", False):
        return (
            "a part of a FullyShardedDataParallel, which reduces its gradients: use fully_shard in its place, "
            "and call gradcomp.torch.compress_fsdp(model)"
        )
    return None


def kind_of(name: str, dimensions: int) -> Kind:
    """Infer the role of a parameter from its name and number of dimensions."""
    last = name.rpartition(".")[2]
    if last.startswith("bias") or last.endswith("bias"):
        return "bias"
    if dimensions <= 1 and _NORM.search(name):
        return "norm"
    return "embedding" if "emb" in name.lower() else "weight"


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> tuple[Named, Named]:
    """Return the optimizer's trainable and its frozen parameters, named, in the order of ``named_parameters``.

    Raises ConfigError for duplicate or missing names and for a trainable parameter that is not the
    optimizer's.
    """
    owned = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    if named_parameters is None:
        named = [
            (f"group{g}.param{i}", p)
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        ]
    else:
        named = list(named_parameters)
    names: dict[int, str] = {}
    for pair in named:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(
                "named_parameters must yield (name, parameter) pairs, as model.named_parameters() does"
            )
        name, parameter = pair
        if id(parameter) in names:
            raise ConfigError(f"one parameter has two names: {names[id(parameter)]!r} and {name!r}")
        names[id(parameter)] = name
    if len(set(names.values())) < len(names):
        twice = sorted({n for n in names.values() if list(names.values()).count(n) > 1})
        raise ConfigError(f"parameter names must be unique; used more than once: {', '.join(twice)}")
    strangers = [n for n, p in named if p.requires_grad and id(p) not in owned]
    if strangers:
        raise ConfigError(f"named parameters that the optimizer does not have: {', '.join(strangers[:5])}")
    unnamed = [p for key, p in owned.items() if key not in names]
    if unnamed:
        shapes = ", ".join(str(tuple(p.shape)) for p in unnamed[:5])
        raise ConfigError(f"{len(unnamed)} of the optimizer's parameters have no name (shapes {shapes})")
    own = [(n, p) for n, p in named if id(p) in owned]
    return [(n, p) for n, p in own if p.requires_grad], [(n, p) for n, p in own if not p.requires_grad]


def refuse_thawed(frozen: Named, when: str, advice: str) -> None:
    """Raise StateError if parameters that were frozen ``when`` the exchange was made require gradients now."""
    if thawed := [name for name, parameter in frozen if parameter.requires_grad]:
        raise StateError(
            f"parameters that were frozen when {when} now require gradients and are not exchanged: "
            f"{', '.join(thawed[:5])}; {advice}"
        )


def rows_of(name: str, gradient: torch.Tensor) -> tuple[Array, Array]:
    """Return the indices and values of the rows of a layer's sparse gradient, on the host, in the wire's dtype."""
    gradient = gradient.coalesce()
    if gradient.sparse_dim() != 1:
        raise StateError(f"layer {name!r}: sparse gradients must be sparse in their rows only")
    wire = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient.indices()[0].cpu().numpy(), gradient.values().to("cpu", wire).contiguous().numpy()


def tensor_of(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Return the sparse tensor with these rows, and with the shape, dtype and device of ``like``."""
    index, values = (torch.from_numpy(array).to(like.device) for array in rows)
    return torch.sparse_coo_tensor(index[None], values.to(like.dtype), like.shape, is_coalesced=True)


def take_over(exchange: Exchange, title: str, before: Exchange | None = None) -> None:
    """Retire earlier exchanges that share parameters with this one, except ``before``, which the caller ends.

    Both would read a gradient and write its mean to the same memory at the same time. An earlier exchange is
    not an error in itself: a notebook cell that runs again wraps a new optimizer while the old one still has
    its name, and training in phases keeps optimizers that it no longer uses. It is an error to use the
    earlier one again. That use raises the error on all ranks, because they make exchanges in the same
    order.
    """
    ours = {id(parameter) for _, parameter in exchange.named}
    for earlier in list(_exchanges.values()):
        shared = [name for name, parameter in earlier.named if id(parameter) in ours]
        if not shared or earlier is before:
            continue
        more = f", ... ({len(shared)} layers)" if len(shared) > 3 else ""
        what = f"layers {', '.join(map(repr, shared[:3]))}{more}"
        logger.info("%s are exchanged by this %s from now on, and no longer by an earlier one", what, title)
        earlier.retire(
            f"{what} are exchanged by a {title} that was made after this one, which exchanges nothing any more: a "
            "gradient can be averaged once only. Give every optimizer parameters of its own, or wrap an optimizer when "
            "earlier ones are no longer used"
        )
    _exchanges[next(_numbers)] = exchange


def exchange_of(parameters: Iterable[torch.Tensor]) -> Exchange | None:
    """Return the exchange that was made last for some of these parameters."""
    held = set(map(id, parameters))
    found = [each for each in _exchanges.values() if any(id(p) in held for _, p in each.named)]
    return found[-1] if found else None


def forget(exchange: Exchange) -> None:
    """Let later exchanges have the parameters of this one, which has ended with its ranks."""
    for number, each in list(_exchanges.items()):
        if each is exchange:
            del _exchanges[number]


def digests_of(named: Named) -> Digests:
    """Compute a checksum of each parameter's bytes."""
    return Digests(CRC32C, {name: _digest(parameter) for name, parameter in named})


def digests_behind(named: Named) -> Callable[[], Digests]:
    """Return a function for any thread that computes the digests as of this point of the current stream.

    The parameters must not change before it returns.
    """
    streams = streams_of(named[0][1].device)
    begun = streams.mark()

    def work() -> Digests:
        with streams.on(streams.another()):  # the thread's current stream is not ordered after the script's
            streams.follow(begun)
            return digests_of(named)

    return work


def _digest(parameter: torch.Tensor) -> int:
    return HOST.kernels.crc32c(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())


class ParameterSamples:
    """Samples parameters where they lie in memory, by one kernel call for all of them.

    On a GPU the call is made on a thread of its own, after the work that computes the parameters, and only
    the first exchange bucket waits for it. On a device without kernels, torch reads the elements, layer by
    layer.
    """

    def __init__(self, named: Named, device: Device) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._forms = [Form.of(parameter) for parameter in self._parameters]
        self._device = device
        self._table = np.zeros(len(named), dtype=SEGMENT)
        self._table["dtype"] = [DTYPE_NUMBERS[dtype_name(parameter.dtype)] for parameter in self._parameters]

    def take(self, turn: int, scalars: str) -> DeferredFingerprint:
        """Return the fingerprint of exchange number ``turn``, or on a GPU a future of it."""
        addresses = np.fromiter(
            map(torch.Tensor.data_ptr, self._parameters), np.uint64, len(self._parameters)
        )
        for i in np.flatnonzero(addresses != self._table["gradient"]).tolist():
            # A parameter whose dtype, shape or device changed is not read; its gradient will be refused.
            parameter, form = self._parameters[i], self._forms[i]
            as_it_was = addresses[i] and form.fits(parameter) and parameter.stride() == form.strides
            self._table["length"][i] = parameter.numel() if as_it_was else 0
        self._table["gradient"] = addresses
        if not self._device.is_late:
            return Fingerprint(_sample(self._device, self._table, turn), scalars)
        table, streams = self._table.copy(), streams_of(self._parameters[0].device)
        begun = streams.mark()

        def work() -> Fingerprint:
            with streams.on(streams.another()):
                streams.follow(begun)
                if self._device.driver is None:
                    return Fingerprint(self._taken(table["length"].tolist(), turn), scalars)
                self._device.follow([self._device.mark(streams.handle())])
                return Fingerprint(_sample(self._device, table, turn), scalars)

        return in_background(self._device.bound(work))

    def _taken(self, lengths: list[int], turn: int) -> Words:
        """Compute the kernel's values from elements that torch reads."""
        values = np.zeros(len(lengths), dtype=np.uint32)
        for i, (length, parameter) in enumerate(zip(lengths, self._parameters, strict=True)):
            if length:
                elements = sampled_elements(length, turn & 0xFFFFFFFF)
                flat = parameter.detach().as_strided((length,), (1,))
                found = flat[torch.from_numpy(elements).to(flat.device)].cpu()
                values[i] = value_of_sample(found.view(_WORDS[found.element_size()]).numpy(), elements)
        return values


#: Size of an element in bytes -> integer dtype that NumPy has too, unlike bfloat16.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(device: Device, table: np.ndarray[Any, Any], turn: int) -> Words:
    values = np.zeros(len(table), dtype=np.uint32)
    device.kernels.sample(table, values, turn=turn & 0xFFFFFFFF)
    return values


class Exchange:
    """Exchanges the gradients of some parameters, and compares these parameters and settings over ranks.

    That is a part of what an :class:`gradcomp.exchange.driver.Adapter` has to do.
    """

    #: The exchanged parameters, with their names.
    named: Named
    #: True in an exchange of ``join()``: a rank that has joined does not step, so nothing of it is compared.
    in_join = False
    _samples: ParameterSamples
    _scalars: Callable[[], str]

    def retire(self, why: str) -> None:
        """Exchange nothing from now on; further use raises a StateError with the text ``why``."""
        raise NotImplementedError

    def digests(self) -> Digests:
        return digests_of(self.named)

    def begin_digests(self) -> Future[Digests]:
        """Compute digests on a thread, after the device work that updates the parameters."""
        return in_background((lambda: NO_SAY) if self.in_join else digests_behind(self.named))

    def fingerprint(self, turn: int) -> DeferredFingerprint:
        """Sample the parameters and the optimizers' settings."""
        return NOTHING if self.in_join else self._samples.take(turn, self._scalars())
