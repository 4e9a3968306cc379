"""The units of a model that ``fully_shard`` has sharded: which parameters travel together, and who holds which part.

``fully_shard`` passes flat tensors to a custom collective. The places of parameters in them follow from
shapes alone and are computed here. The computed size is compared with every tensor's size, and the places once with
the shards themselves, so a torch that uses another layout raises ConfigError.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.requests import Blocks
from gradcomp.torch.layers import kind_of
from gradcomp.torch.tensors import dtype_name


@dataclass(frozen=True)
class Sharded:
    """A parameter of shape ``shape``, which ``fully_shard`` cuts into ``world`` shards along ``dimension``.

    ``mesh`` is its DeviceMesh while it is sharded. ``module.attribute`` is a DTensor then, and a plain tensor
    while the parameter is gathered.
    """

    name: str
    module: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]
    dimension: int
    world: int
    mesh: Any = None

    @property
    def current(self) -> torch.Tensor:
        """The tensor that the module has now, sharded or whole."""
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found

    @property
    def shard(self) -> torch.Tensor | None:
        """This rank's shard; None while the parameter is gathered, or resharded to another mesh after forward."""
        parameter = self.current
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh:
            return None
        with torch.no_grad():
            return parameter.to_local()

    def spec(self, dtype: torch.dtype) -> LayerSpec:
        return LayerSpec(self.name, self.shape, dtype_name(dtype), kind_of(self.name, len(self.shape)))

    def room(self, members: int) -> int:
        """Return the number of elements that this parameter takes in a rank's block, padding included.

        ``fully_shard`` pads for ``world`` ranks. ``members`` is the number of blocks: ``world``, or fewer in a mesh for
        resharding after forward.
        """
        rows = self.shape[self.dimension]
        row = prod(self.shape) // rows if rows else 0
        return -(-rows // self.world) * row * self.world // members

    def borders(self, members: int) -> tuple[int, ...]:
        """Return the limits of the shards in the flat parameter, in rank order, without padding."""
        size, room = prod(self.shape), self.room(members)
        return tuple(min(rank * room, size) for rank in range(members + 1))


#: The attributes in which ``checkpoint_wrapper`` and ``torch.compile(module)`` hold the module that they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")

#: Identifies the values of a rank's shards: for each, the parameter, its version, and the shard's version and address.
Snapshot = list[tuple[weakref.ref[torch.Tensor], int, int, int]]


@dataclass(eq=False)
class Unit:
    """Parameters that ``fully_shard`` gathers and reduces together, in the order in which it lays them out.

    ``ranks`` lists the ranks of torch.distributed that hold shards. ``with_gradient`` holds the numbers of parameters
    that have a gradient which was not reduced yet.
    """

    name: str
    modules: list[FSDPModule]
    parameters: list[Sharded]
    ranks: tuple[int, ...]
    with_gradient: set[int] = field(default_factory=set)
    _watched: set[int] = field(default_factory=set)

    @property
    def group(self) -> Any:
        """Return torch's FSDPParamGroup of these parameters; ConfigError if there are several."""
        groups = fully_shard.state(self.modules[0])._fsdp_param_groups  # type: ignore[attr-defined]
        if len(groups) != 1:
            raise ConfigError(
                f"{self.name} has {len(groups)} groups of parameters: call fully_shard once for each"
            )
        return groups[0]

    def blocks(self, numbers: Iterable[int], members: int) -> Blocks:
        """Return the layout of these parameters' shards in a rank's block of the flat tensor."""
        ends = [0, *accumulate(self.parameters[i].room(members) for i in numbers)]
        return Blocks(ends[-1], tuple(ends[:-1]))

    def check_gathered(self, elements: int, members: int) -> None:
        """Raise ConfigError unless a tensor of this many elements holds the shards of all parameters."""
        expected = self.blocks(range(len(self.parameters)), members).size * members
        if expected != elements:
            raise ConfigError(self._otherwise("shards", elements, members, f"{expected}"))

    def check_places(self, block: torch.Tensor) -> None:
        """Raise ConfigError unless this rank's shards are at the expected places of its block."""
        places = self.blocks(range(len(self.parameters)), len(self.ranks)).offsets
        for one, begin in zip(self.parameters, places, strict=True):
            if (shard := one.shard) is None:
                continue
            expected = shard.detach().reshape(-1).to(block.dtype)
            found = block[begin : begin + expected.numel()]
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                raise ConfigError(
                    f"{self.name}: torch {torch.__version__} does not gather {one.name!r} from element {begin} on, "
                    "where compress_fsdp expects it; compress_fsdp does not know this layout"
                )

    def reduced(self, elements: int, members: int) -> list[int]:
        """Return the numbers of the parameters whose gradients a tensor of this many elements holds.

        These are the parameters in ``with_gradient``, or else all trainable ones. ConfigError if neither fits.
        """
        trainable = [i for i, one in enumerate(self.parameters) if one.current.requires_grad]
        expected = []
        for numbers in (sorted(self.with_gradient), trainable):
            expected.append(self.blocks(numbers, members).size * members)
            if expected[-1] == elements:
                return numbers
        raise ConfigError(
            self._otherwise(
                "gradients", elements, members, f"{expected[0]}, or {expected[1]} with zeros for the others"
            )
        )

    def _otherwise(self, what: str, elements: int, members: int, expected: str) -> str:
        return (
            f"{self.name}: torch {torch.__version__} passes {elements} elements of {what} on {members} ranks, where "
            f"compress_fsdp expects {expected}"
        )

    def snapshot(self) -> Snapshot | None:
        """Identify the values of this rank's shards; None while the parameters are whole."""
        shards = [one.shard for one in self.parameters]
        if any(shard is None for shard in shards):
            return None
        return [
            (weakref.ref(one.current), one.current._version, shard._version, shard.data_ptr())
            for one, shard in zip(self.parameters, shards, strict=True)
            if shard is not None
        ]

    @property
    def accumulates(self) -> bool | None:
        """True if the first trainable parameter has a gradient already.

        None while it has no shard (see :attr:`Sharded.shard`), or if all parameters are frozen.
        """
        for one in self.parameters:
            if (parameter := one.current).requires_grad:
                return None if one.shard is None else parameter.grad is not None
        return None

    def watch_gradients(self, *_: object) -> None:
        """Record which parameters get a gradient; a module's forward hook, called when its parameters are whole."""
        for i, one in enumerate(self.parameters):
            parameter = one.current
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))  # fully_shard keeps these tensors for all steps
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, i=i: self.with_gradient.add(i)
                )


def find_units(model: torch.nn.Module) -> list[Unit]:
    """Reshard the model and return its units in module order; ConfigError if ``fully_shard`` was not called."""
    grouped: dict[int, list[FSDPModule]] = {}
    titles: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays whole after a forward pass
            state = fully_shard.state(module)  # type: ignore[attr-defined]
            # Modules that were sharded together share a state, which holds them in the order of their parameters.
            grouped.setdefault(id(state), list(getattr(state, "_modules", ())) or [module])
            titles.setdefault(id(state), unit_name(name))
    names = _names(model)
    units = [_unit(titles[key], modules, names) for key, modules in grouped.items()]
    units = [unit for unit in units if unit.parameters]
    if not units:
        raise ConfigError(_unsharded(model))
    return units


def _unsharded(model: torch.nn.Module) -> str:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return (
            "the model is a FullyShardedDataParallel (FSDP1), which takes no custom collectives: shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    return (
        f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on it first, or "
        "gradcomp.torch.DistributedOptimizer if every rank is to have the whole model"
    )


def unit_name(name: str) -> str:
    """Return the name of the unit whose first module has this name."""
    return _unwrapped(name) or "the root module"


def _unwrapped(name: str) -> str:
    """Return the name that a module or parameter has without wrappers, as torch's checkpoints name it.

    Random numbers and policies depend on names, and must not change with activation checkpointing or torch.compile.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _names(model: torch.nn.Module) -> dict[int, str]:
    """Return names by the parameters' ids; a parameter that is used twice has its first name."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), _unwrapped(name))
    return names


def _unit(title: str, modules: list[FSDPModule], names: dict[int, str]) -> Unit:
    parameters: list[Sharded] = []
    ranks: set[tuple[int, ...]] = set()
    known: set[int] = set()
    for module in _managed(modules):
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in known or not isinstance(parameter, DTensor):
                continue  # tied to another parameter, or excluded from the sharding
            known.add(id(parameter))
            mesh_dimension, dimension = _shard_of(names[id(parameter)], parameter)
            group = parameter.device_mesh.get_group(mesh_dimension)
            ranks.add(tuple(dist.get_process_group_ranks(group)))
            name, shape = names[id(parameter)], tuple(parameter.shape)
            mesh = parameter.device_mesh
            parameters.append(Sharded(name, module, attribute, shape, dimension, group.size(), mesh))
    if len(ranks) > 1:
        raise ConfigError(
            f"{title} has parameters on several meshes ({len(ranks)} groups of ranks); torch takes no custom "
            "collective for that: call fully_shard separately on the modules of each mesh"
        )
    return Unit(title, modules, parameters, next(iter(ranks), ()))


def _managed(modules: Sequence[FSDPModule]) -> Iterator[torch.nn.Module]:
    """Yield the modules of a unit in the order of ``fully_shard``: children before their parent."""
    seen: set[torch.nn.Module] = set()

    def walk(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if module in seen or (isinstance(module, FSDPModule) and module not in modules):
            return
        seen.add(module)
        for child in module.children():
            yield from walk(child)
        yield module

    for module in modules:
        assert isinstance(module, torch.nn.Module), "an FSDPModule is a Module"
        yield from walk(module)


def _shard_of(name: str, parameter: DTensor) -> tuple[int, int]:
    """Return the mesh dimension that shards the parameter, and the tensor dimension that is cut."""
    placements, mesh = parameter.placements, parameter.device_mesh
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(placements[sharded[0]]) is not Shard:
        dimensions = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        where = ", ".join(f"{dimensions[i]}: {placement}" for i, placement in enumerate(placements))
        raise ConfigError(
            f"parameter {name!r} has the placements {where}: gradcomp compresses only parameters that exactly one mesh "
            "dimension shards, and no tensor parallelism"
        )
    shard = placements[sharded[0]]
    assert isinstance(shard, Shard), "checked above"
    return sharded[0], shard.dim
