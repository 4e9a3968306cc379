"""Broadcasts the root's parameters, optimizer state and objects; gathers objects.

:mod:`gradcomp.torch.collectives` describes what all calls share. ``root_rank`` is a rank of the job, also if a
process set takes part.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.exchange.checkpoint_manager import not_from_checkpoint
from gradcomp.exchange.request_group import Call
from gradcomp.job import objects, runtime
from gradcomp.job.channel import Channel, alone, chunks, current_channel
from gradcomp.job.process_sets import Members, ranks_of, root_of
from gradcomp.torch.tensors import culprit, dense_problem, form, has_memory

logger = logging.getLogger("gradcomp")

_ALIGNMENT_BYTES = 16


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: Members = None,
) -> None:
    """Overwrite parameters and buffers on every rank with those of ``root_rank``, in place, bit for bit.

    ``params`` is a module, with its extra state (``get_extra_state``) and buffers that are not persistent; a
    ``state_dict()``; ``(name, tensor)`` pairs such as ``named_parameters()``; or tensors such as ``parameters()``,
    whose names are their positions. Names, shapes and dtypes must be the same on all ranks; the order of pairs not.
    Extra state, and entries of a dict that are not tensors, are replaced as by :func:`broadcast_object`. A
    ``state_dict()`` cannot give a module its extra state; a warning says so. Nothing happens on a rank outside
    ``process_set``. Wire: d bytes in all, in broadcasts of up to 64 MiB or of one larger tensor.
    """
    if runtime.rank() not in ranks_of(process_set):
        return
    stateful: dict[str, torch.nn.Module] = {}
    if isinstance(params, torch.nn.Module):
        plain = torch.nn.Module.get_extra_state  # state_dict() takes any other one for extra state, too
        stateful = {n: m for n, m in params.named_modules() if type(m).get_extra_state is not plain}
        params = [*params.named_parameters(), *params.named_buffers()]
    entries, problem = _entries(params)
    lines = [f"broadcast_parameters(root_rank={root_rank})"]
    lines += [f"{name}: {form(value)}" for name, value in entries]
    lines += [f"{name}: extra state" for name in stateful]
    channel, root = _compare("broadcast_parameters", lines, problem, root_rank, process_set)
    if channel is None:
        return
    tensors = [value.detach() for _, value in entries if isinstance(value, torch.Tensor)]
    for chunk in chunks(tensors, lambda tensor: _aligned(tensor.nbytes)):
        _broadcast_chunk(channel, chunk, root)
    others = {name: value for name, value in entries if not isinstance(value, torch.Tensor)}
    if others:
        received = broadcast_object(others, root_rank, process_set=process_set)
        if channel.rank != root:
            assert isinstance(params, MutableMapping)
            params.update(received)
    if stateful:
        is_root = channel.rank == root
        states = {name: module.get_extra_state() for name, module in stateful.items()} if is_root else None
        received = broadcast_object(states, root_rank, process_set=process_set)
        if channel.rank != root:
            for name, module in stateful.items():
                module.set_extra_state(received[name])
    found = [name for name, _ in entries if name.rpartition(".")[2] == "_extra_state"]
    if found and channel.rank == 0:
        logger.warning(
            "broadcast_parameters: extra state of modules (%s%s) was replaced in the state_dict, but not in the other "
            "ranks' modules: pass the module itself, gc.broadcast_parameters(model)",
            found[0],
            f" and {len(found) - 1} more" if len(found) > 1 else "",
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: Members = None,
) -> None:
    """Give every rank's optimizer the state and the hyperparameters of ``root_rank``'s, bit for bit.

    This works for any optimizer, including LBFGS, also where only the root has state or other ranks have more: no step
    is taken to make state, and gradients do not change. The optimizers must be of one class, with groups of the same
    parameter shapes and dtypes. ``model`` is Horovod's argument, which finds sparse parameters there and has no effect
    here. Nothing happens on a rank outside ``process_set``. Wire: a :func:`broadcast_object` of
    ``optimizer.state_dict()``.
    """
    if runtime.rank() not in ranks_of(process_set):
        return
    lines = [f"broadcast_optimizer_state(root_rank={root_rank})"]
    problem: str | None = None
    given: Any = optimizer
    module: Any = model
    if isinstance(given, torch.optim.Optimizer):
        lines.append(type(optimizer).__name__)
        for number, group in enumerate(optimizer.param_groups):
            lines += [f"group {number}: {form(parameter)}" for parameter in group["params"]]
    else:
        problem = f"not a torch.optim.Optimizer: {type(optimizer).__name__}"
    if not isinstance(module, torch.nn.Module | None):
        problem = problem or f"model must be a torch.nn.Module or None, got {type(module).__name__}"
    channel, root = _compare("broadcast_optimizer_state", lines, problem, root_rank, process_set)
    if channel is None:
        return
    is_root = channel.rank == root
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, process_set=process_set)
    if not is_root:
        with not_from_checkpoint(optimizer):
            optimizer.load_state_dict(state)
        _restore_dtypes(optimizer, state["state"])


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[int, Any]) -> None:
    """Undo the casts of ``load_state_dict`` to the parameters' dtypes, which the root's state did not undergo."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved.items():
        # A key that is not a parameter's number stands for itself.
        key: Any = parameters[index] if index in range(len(parameters)) else index
        held = optimizer.state[key]
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Members = None
) -> Any:
    """Return ``root_rank``'s object on every rank; the other ranks' argument is ignored.

    Objects are tensors (received on the CPU), numbers, strings, bytes, None, and lists, tuples, dicts and
    sets of them. Unlike Horovod, gradcomp never unpickles arbitrary classes: anything else raises a
    ConfigError on every rank. Wire: one broadcast of the object as ``torch.save`` writes it.
    """
    return objects.broadcast_object(obj, _encode, _decode, root_rank, name, process_set)


def problem_of_sending(obj: Any) -> str | None:
    """Return why :func:`broadcast_object` could not send this, or None."""
    try:
        _encode(obj)
    except ConfigError as error:
        return str(error)
    return None


def allgather_object(obj: Any, name: str | None = None, process_set: Members = None) -> list[Any]:
    """Return every rank's object, in rank order.

    :func:`broadcast_object` lists the objects that can be sent; any other object raises a ConfigError on every rank.
    Wire: one all-to-all of the objects as ``torch.save`` writes them.
    """
    return objects.allgather_object(obj, _encode, _decode, name, process_set)


def _compare(
    name: str, lines: list[str], problem: str | None, root_rank: Any, process_set: Members
) -> tuple[Channel | None, int]:
    """Compare a call over ranks; return the channel, or None for one rank, and the root's rank in it."""
    channel, (root, wrong_root) = current_channel(process_set), root_of(root_rank, process_set)
    call = Call(name, lines, problem=problem or wrong_root)
    (alone(call) if channel is None else channel.submit(call, lambda _: None)).result()
    return channel, root


def _encode(obj: Any) -> bytes:
    try:
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        data = buffer.getvalue()
        _refuse_wrapped(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # pickling runs the object's own code
        raise ConfigError(
            "only tensors, numbers, strings, bytes, None and lists, tuples, dicts and sets of them can be sent, "
            f"this has {culprit(error, obj)}"
        ) from error
    return data


def _refuse_wrapped(value: Any) -> None:
    """Raise TypeError for DTensors, which torch would read back, with the root's part only."""
    if isinstance(value, torch.Tensor) and not has_memory(value):
        raise TypeError("a tensor whose values are in others; use to_local() or full_tensor()")
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        for each in value:
            _refuse_wrapped(each)


def _decode(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise WireFormatError(f"these {len(data)} bytes are no object") from error


def _entries(params: Any) -> tuple[list[tuple[str, Any]], str | None]:
    """Return the named values in order of name, and a problem with them if there is one."""
    try:
        given = list(params.items() if isinstance(params, Mapping) else params)
        if given and all(isinstance(each, torch.Tensor) for each in given):
            given = [(f"parameter {place}", tensor) for place, tensor in enumerate(given)]
        pairs = [(name, value) for name, value in given]
    except (TypeError, ValueError):
        return (
            [],
            "params must be a module, a state_dict, (name, tensor) pairs such as named_parameters(), or tensors",
        )
    names = [name for name, _ in pairs]
    if not all(isinstance(name, str) for name in names):
        return [], "a name in params is not a string"
    if (
        repeated := {name for name in names if names.count(name) > 1}
        if len(set(names)) < len(names)
        else None
    ):
        return [], f"name {min(repeated)!r} appears twice in params"
    for name, value in pairs:
        if isinstance(value, torch.Tensor):
            if problem := dense_problem(value):
                return [], f"{name}: {problem}"
        elif not isinstance(params, MutableMapping):
            return [], f"{name} is not a tensor but {type(value).__name__}, and params is not a dict"
    return sorted(pairs), None


def _broadcast_chunk(channel: Channel, tensors: list[torch.Tensor], root: int) -> None:
    """Broadcast the bytes of all tensors at once, each at a multiple of 16."""
    buffer = torch.zeros(sum(_aligned(t.nbytes) for t in tensors), dtype=torch.uint8)
    parts, start = [], 0
    for tensor in tensors:
        parts.append(buffer[start : start + tensor.nbytes])
        start += _aligned(tensor.nbytes)
    if channel.rank == root:
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
    call = Call("broadcast_parameters", [f"{len(buffer)} bytes from rank {root}"])
    channel.submit(call, lambda _: channel.broadcast(buffer.numpy(), root)).result()
    if channel.rank != root:
        with torch.no_grad():
            for part, tensor in zip(parts, tensors, strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
