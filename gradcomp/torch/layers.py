"""Makes layer specs of named parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Kind, LayerSpec
from gradcomp.torch.tensors import dense_problem, dtype_name, is_dtensor

Named = list[tuple[str, torch.nn.Parameter]]

_NORM = re.compile(r"(^|[._])(norm|ln|bn|layernorm|batchnorm|groupnorm|rmsnorm)", re.IGNORECASE)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from slowest to fastest in memory."""
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-int(tensor.stride()[d]), d)))


def spec(name: str, parameter: torch.Tensor) -> LayerSpec:
    """Return a parameter's spec.

    Its shape is in memory order, so that ranks notice when their memory layouts differ.
    """
    if problem := _sharded(parameter) or dense_problem(parameter):
        raise ConfigError(f"layer {name!r}: {problem}")
    if parameter.dtype.is_complex:
        raise ConfigError(f"layer {name!r} is complex; register its view_as_real form")
    shape = tuple(parameter.shape)
    if not parameter.is_contiguous():
        shape = tuple(shape[d] for d in memory_order(parameter))
    return LayerSpec(name, shape, dtype_name(parameter.dtype), kind_of(name, parameter.dim()))


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


def _is_named(pair: Any) -> bool:
    return (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
    )


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
        if not _is_named(pair):
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
