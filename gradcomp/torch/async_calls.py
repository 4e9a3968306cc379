"""Collectives on groups of tensors, started without autograd; their handles, arrays and compressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.compress.quantise.cast import CODERS, Coder
from gradcomp.job import collectives, runtime
from gradcomp.job.call_matching import Reply
from gradcomp.job.collectives import Descriptor, check_free
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.job.reduce_op import ScaledOp, dtype_of, shares
from gradcomp.torch.tensors import dense_problem, dtype_name

Array = npt.NDArray[Any]

#: Dtypes that can be reduced.
REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)

Tensors = Sequence[torch.Tensor]


def host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """Return the values as a flat tensor in host memory.

    It is the tensor's own memory if that is contiguous on the host and ``copy`` is false.
    """
    flat = tensor.detach()
    if not flat.is_cpu or flat.is_conj() or flat.is_neg():
        flat = flat.cpu().resolve_conj().resolve_neg()
    flat = flat.contiguous().view(-1)
    return flat.clone() if copy and shares_memory(flat, tensor) else flat


def shares_memory(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if writing to ``flat`` writes to ``tensor``."""
    return tensor.device.type == "cpu" and flat.data_ptr() == tensor.data_ptr()


def array_of(flat: torch.Tensor) -> Array:
    """View the memory as an array of the same dtype."""
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    array: Array = flat.numpy()
    return array


def bytes_view(flat: torch.Tensor) -> npt.NDArray[np.uint8]:
    if len(flat) == 0:  # an empty tensor may have a stride that torch cannot view as another dtype
        return np.empty(0, np.uint8)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def tensor_of(values: Array, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return bytes, or values of the dtype of ``like``, as a tensor of that dtype, on its device."""
    if values.size == 0:  # an empty array may have a stride that torch cannot view as another dtype
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    flat = torch.from_numpy(values.view(np.uint8)).view(like.dtype)
    return flat.view(tuple(shape)).to(like.device)


def descriptors(
    kind: str,
    tensors: Any,
    name: str | None,
    process_set: Members,
    how: ScaledOp | None = None,
    root: int | None = None,
    problem: str | None = None,
) -> tuple[list[Descriptor], str | None]:
    """Return descriptors of the call on one or more tensors, and the reason why it is impossible, or None.

    Raises ConfigError for a name whose last call has not ended.
    """
    ranks = members(process_set)
    check_free(kind, ranks, name)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        wrong: str | None = f"not a list of tensors but {type(tensors).__name__}"
    else:
        wrong = None if len(tensors) else "an empty list of tensors"
        dtypes = None if how is None else REDUCIBLE
        for place, tensor in enumerate(tensors):
            if wrong is None and (told := dense_problem(tensor, dtypes)):
                wrong = told if len(tensors) == 1 else f"tensor {place}: {told}"
    problem = problem or (how.problem if how else None) or wrong
    if problem is not None:
        return [Descriptor(kind, ranks, name)], problem
    forms = [(dtype_name(each.dtype), each.element_size(), tuple(each.shape)) for each in tensors]
    return [Descriptor(kind, ranks, name, *form, how, root) for form in forms], None


def needs_gradient(tensors: Sequence[Any]) -> bool:
    """Return True if autograd must record an operation on these tensors."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


class Handle:
    """An asynchronous operation; give it to :func:`poll` and :func:`synchronize`, or call it."""

    def __init__(self, reply: Reply[Any], finish: Callable[[Any], Any]) -> None:
        self._reply = reply
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def poll(self) -> bool:
        """Return True once :meth:`wait` returns, or raises, without waiting."""
        return self._reply.done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; further calls return the same object."""
        received = self._reply.result()
        if self._finish is not None:
            with torch.no_grad():
                self._result = self._finish(received)
            self._finish = None
        return self._result

    __call__ = wait

    def one(self) -> Handle:
        """Return a handle of the only member of this group, to be used in its place."""
        finish = self._finish
        assert finish is not None, "one() comes before wait()"
        return Handle(self._reply, lambda received: finish(received)[0])


def poll(handle: Handle) -> bool:
    """Return True if :func:`synchronize` would return at once. Local."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation of any kind and return its result.

    That is a tensor, a list of them for a group, or a tensor and splits for an all-to-all. A second call
    returns the same object. Raises what the operation raised.
    """
    return handle.wait()


def coder(half: str | None) -> Coder:
    """Return the coder for which float32 and float64 tensors travel in this half precision, if there is one."""

    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if half and isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
            return tensor.to(getattr(torch, half)), tensor.dtype
        return tensor, None

    def decompress(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        return tensor if dtype is None else tensor.to(dtype)

    return compress, decompress


CODERS["torch"] = coder


def _result(flat: torch.Tensor, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Return the values of ``flat`` in a tensor like ``tensor``, which is ``tensor`` itself if ``in_place``."""
    if not in_place:
        return flat.view(tensor.shape).to(tensor.device)
    if not shares_memory(flat, tensor):
        return tensor.copy_(flat.view(tensor.shape))
    torch.autograd.graph.increment_version(tensor)
    return tensor


def begin_allreduce(
    tensors: Tensors, name: str | None, how: ScaledOp, process_set: Members, *, in_place: bool = False
) -> Handle:
    """Start a group's allreduce, in the tensors' own memory where that is dense, on the host and ``in_place``."""
    called, problem = descriptors("allreduce", tensors, name, process_set, how)
    flats = [] if problem else [host(tensor, copy=not in_place) for tensor in tensors]

    def finish(_: None) -> list[torch.Tensor]:
        return [_result(flat, tensor, in_place) for tensor, flat in zip(tensors, flats, strict=True)]

    return Handle(collectives.allreduce(called, [array_of(flat) for flat in flats], problem), finish)


def begin_reducescatter(tensors: Tensors, name: str | None, how: ScaledOp, process_set: Members) -> Handle:
    called, problem = descriptors("reducescatter", tensors, name, process_set, how)
    flats = [] if problem else [host(tensor, copy=False) for tensor in tensors]
    ranks = called[0].ranks
    place = ranks.index(runtime.rank())

    def finish(parts: list[Any]) -> list[torch.Tensor]:
        return [
            tensor_of(part, (shares(len(tensor), len(ranks))[place], *tensor.shape[1:]), tensor)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    return Handle(collectives.reducescatter(called, [array_of(flat) for flat in flats], problem), finish)


def begin_allgather(
    tensors: Tensors, name: str | None, process_set: Members, starts: list[int] | None = None
) -> Handle:
    """Start a group's allgather; appends to ``starts`` the row at which this rank's part of each result begins."""
    called, problem = descriptors("allgather", tensors, name, process_set)
    flats = [] if problem else [host(tensor, copy=False) for tensor in tensors]

    def finish(parts: list[tuple[Any, list[int]]]) -> list[torch.Tensor]:
        ranks = called[0].ranks
        among_one, place = len(ranks) == 1, ranks.index(runtime.rank())
        if starts is not None:
            starts.extend(sum(rows[:place]) for _, rows in parts)
        return [
            tensor_of(whole.copy() if among_one else whole, (sum(rows), *tensor.shape[1:]), tensor)
            for (whole, rows), tensor in zip(parts, tensors, strict=True)
        ]

    return Handle(collectives.allgather(called, [bytes_view(flat) for flat in flats], problem), finish)


def begin_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Members, *, in_place: bool = False
) -> Handle:
    """Start a broadcast, into the tensor's own memory where that is dense, on the host and ``in_place``."""
    _, problem = root_of(root_rank, process_set)
    called, problem = descriptors("broadcast", [tensor], name, process_set, root=root_rank, problem=problem)
    flat = torch.empty(0, dtype=torch.uint8) if problem else host(tensor, copy=not in_place)

    received = collectives.broadcast(called[0], bytes_view(flat), problem)
    return Handle(received, lambda _: _result(flat, tensor, in_place))


def begin_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: Members) -> Handle:
    """Start an all-to-all, whose result is the received rows and the number of rows from each rank (int32)."""
    (called, *_), problem = descriptors("alltoall", [tensor], name, process_set)
    flat = torch.empty(0, dtype=torch.uint8) if problem else host(tensor, copy=False)
    counts, wrong = _counts(splits)
    parts: list[int] = []
    if problem is None and wrong is None:
        parts, wrong = collectives.splits_of(called, counts)

    def finish(result: tuple[Any, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        whole, received = result
        among_one = len(called.ranks) == 1
        rows = tensor_of(whole.copy() if among_one else whole, (sum(received), *tensor.shape[1:]), tensor)
        return rows, torch.tensor(received, dtype=torch.int32)

    return Handle(collectives.alltoall(called, bytes_view(flat), parts, problem or wrong), finish)


def _counts(splits: Any) -> tuple[Any, str | None]:
    """Return the splits as an array of integers, or None and the problem with them."""
    if splits is None:
        return None, None
    try:
        counts = np.asarray(splits.detach().cpu() if isinstance(splits, torch.Tensor) else splits)
    except (ValueError, TypeError):
        return None, "splits must be integers"
    if counts.dtype.kind in "iu":
        return counts, None
    return None, f"splits must be integers, got {counts.dtype}"
