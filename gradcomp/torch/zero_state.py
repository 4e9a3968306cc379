"""The state of ``ZeroOptimizer`` in the form of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradcomp.core.errors import StateError
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.torch.zero_parts import Part, flat

Groups = Sequence[Mapping[str, Any]]


def places_of(groups: Groups) -> dict[int, int]:
    """Return the numbers that parameters have in a state, by their ids."""
    return {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}


def copied(value: Any) -> Any:
    """Return a copy of a number, which optimizers change in place if it is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def joined(
    part: Part, value: torch.Tensor, exchanger: Exchanger | None, *, keeps: bool
) -> torch.Tensor | None:
    """Return all ranks' values in the parameter's shape; None unless this rank keeps them. Collective."""
    payloads = [value.detach().contiguous().view(torch.uint8).numpy().tobytes()]
    if exchanger is not None:
        payloads = exchanger.allgather_bytes(payloads[0])
    if not keeps:
        return None
    found = torch.empty_like(part.parameter, dtype=value.dtype, requires_grad=False)
    if found.numel():
        flat(found).copy_(torch.frombuffer(bytearray(b"".join(payloads)), dtype=value.dtype))
    return found


def cut(full: Mapping[str, Any], groups: Groups, parts: Sequence[Part], numbers: set[str]) -> dict[str, Any]:
    """Return the state of whole parameters in the form of :meth:`ZeroOptimizer.state_dict`.

    ``numbers`` names the state that is not cut. Raises StateError for the state of other parameters.
    """
    sizes = [[len(group["params"]) for group in each] for each in (full["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise StateError(f"the state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}")
    places = places_of(groups)
    own = {places[id(part.parameter)]: i for i, part in enumerate(parts)}

    def of(part: Part, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != part.parameter.shape:
            raise StateError(
                f"the state of {part.name!r} has shape {list(value.shape)}, the parameter {list(part.parameter.shape)}"
            )
        whole = torch.empty_like(part.parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        return flat(whole)[part.begin : part.end].clone()

    state = {
        i: {
            key: copied(value) if key in numbers else of(parts[i], value)
            for key, value in full["state"][place].items()
        }
        for place, i in own.items()
        if place in full["state"]
    }
    kept = [
        {**group, "params": [own[place] for place in group["params"] if place in own]}
        for group in full["param_groups"]
    ]
    masters = full.get("masters")
    given = [
        part.replica if masters is None else of(part, masters[place])
        for part, place in zip(parts, own, strict=True)
    ]
    return {"state": state, "param_groups": kept, "masters": given}
