"""What ``fully_shard`` has made of a model, from its modules and parameters: what travels together, and who has what.

``fully_shard`` hands a custom collective flat tensors. Where parameters are in them follows from shapes alone. It is
computed here and compared with the size of the tensor, so that a torch that lays them out otherwise is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.pipeline.request_arrays import Blocks
from gradcomp.torch.layers import dtype_name, kind_of


@dataclass(frozen=True)
class Sharded:
    """One parameter. ``shape``: of the whole. ``dimension``: along which it is sharded, among so many ranks.

    ``module`` and ``attribute``: where it is found; what is there is a DTensor between uses, and whole in use.
    """

    name: str
    module: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]
    dimension: int
    world: int

    @property
    def current(self) -> torch.Tensor:
        """What the module has now."""
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found

    def spec(self, dtype: torch.dtype) -> LayerSpec:
        """Of the whole."""
        return LayerSpec(self.name, self.shape, dtype_name(dtype), kind_of(self.name, len(self.shape)))

    def room(self, members: int) -> int:
        """Elements of a rank's place for it, if so many ranks share what ``world`` ranks have with their padding."""
        rows = self.shape[self.dimension]
        row = _product(self.shape) // rows if rows else 0
        return -(-rows // self.world) * row * self.world // members

    def borders(self, members: int) -> tuple[int, ...]:
        """Of the shards, in the order of ranks, one behind the other without padding."""
        size, room = _product(self.shape), self.room(members)
        return tuple(min(rank * room, size) for rank in range(members + 1))


@dataclass(eq=False)
class Unit:
    """Parameters that ``fully_shard`` gathers and reduces together, in its order.

    ``ranks``: those of torch.distributed that have shards. ``with_gradient``: numbers of those whose gradient has not
    been reduced yet.
    """

    name: str
    modules: list[FSDPModule]
    parameters: list[Sharded]
    ranks: tuple[int, ...]
    with_gradient: set[int] = field(default_factory=set)
    _watched: set[int] = field(default_factory=set)

    def blocks(self, numbers: Sequence[int], members: int) -> Blocks:
        """Where shards of these parameters lie in the tensor that so many ranks share."""
        ends = [0, *accumulate(self.parameters[i].room(members) for i in numbers)]
        return Blocks(ends[-1], tuple(ends[:-1]))

    def gathered(self, elements: int, members: int) -> list[int]:
        """The parameters whose shards are in a tensor of so many elements: all."""
        numbers = list(range(len(self.parameters)))
        if (expected := self.blocks(numbers, members).size * members) != elements:
            raise ConfigError(self._otherwise("shards", elements, members, f"{expected}"))
        return numbers

    def reduced(self, elements: int, members: int) -> list[int]:
        """The parameters whose gradients are in a tensor of so many elements: those that have one, or all."""
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
            f"{self.name}: torch {torch.__version__} gives {elements} elements of {what} on {members} ranks; by its "
            f"parameters they are {expected}"
        )

    def versions(self) -> tuple[int, ...]:
        """They change when the shards of this rank do: by an optimizer's step or a loaded checkpoint."""
        with torch.no_grad():
            return tuple(p._version + p.to_local()._version for p in self._sharded())

    def _sharded(self) -> Iterator[DTensor]:
        return (p for p in (one.current for one in self.parameters) if isinstance(p, DTensor))

    def watch_gradients(self, *_: object) -> None:
        """A module's hook, when its parameters are whole: note from now on which of them get a gradient."""
        for i, one in enumerate(self.parameters):
            parameter = one.current
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))  # fully_shard keeps these tensors for all steps
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, i=i: self.with_gradient.add(i)
                )


def find_units(model: torch.nn.Module) -> list[Unit]:
    """Of a model, in the order of its modules. ConfigError for a model that ``fully_shard`` was not called on."""
    names = _names(model)
    grouped: dict[int, list[FSDPModule]] = {}
    titles: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = id(fully_shard.state(module))  # type: ignore[attr-defined]  # modules that were given together share it
            grouped.setdefault(state, []).append(module)
            titles.setdefault(state, name or "the root module")
    if not grouped:
        raise ConfigError(_unsharded(model))
    units = [_unit(titles[key], modules, names) for key, modules in grouped.items()]
    return [unit for unit in units if unit.parameters]


def _unsharded(model: torch.nn.Module) -> str:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return (
            "the model is a FullyShardedDataParallel (FSDP1), which has no place for other collectives: shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    return (
        f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on it first, or "
        "gradcomp.torch.DistributedOptimizer if every rank is to have the whole model"
    )


def _names(model: torch.nn.Module) -> dict[int, str]:
    """By identity; a parameter that is used twice has the first name."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def _unit(title: str, modules: list[FSDPModule], names: dict[int, str]) -> Unit:
    parameters: list[Sharded] = []
    ranks: set[tuple[int, ...]] = set()
    known: set[int] = set()
    for module in _managed(modules):
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in known or not isinstance(parameter, DTensor):
                continue  # tied, or left out of the sharding
            known.add(id(parameter))
            mesh_dimension, dimension = _shard_of(names[id(parameter)], parameter)
            group = parameter.device_mesh.get_group(mesh_dimension)
            ranks.add(tuple(dist.get_process_group_ranks(group)))
            name, shape = names[id(parameter)], tuple(parameter.shape)
            parameters.append(Sharded(name, module, attribute, shape, dimension, group.size()))
    if len(ranks) > 1:
        raise ConfigError(
            f"{title} has parameters on several meshes ({len(ranks)} groups of ranks), where torch takes no custom "
            "collective: call fully_shard on the modules of each mesh"
        )
    return Unit(title, modules, parameters, next(iter(ranks), ()))


def _managed(modules: Sequence[FSDPModule]) -> Iterator[torch.nn.Module]:
    """The modules whose parameters belong to these, as ``fully_shard`` orders them: children before their parent."""
    seen: set[torch.nn.Module] = set()
    roots: set[torch.nn.Module] = {*_as_modules(modules)}

    def walk(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if module in seen or (isinstance(module, FSDPModule) and module not in roots):
            return
        seen.add(module)
        for child in module.children():
            yield from walk(child)
        yield module

    for module in _as_modules(modules):
        yield from walk(module)


def _as_modules(modules: Sequence[FSDPModule]) -> list[torch.nn.Module]:
    """What they are beside."""
    return [module for module in modules if isinstance(module, torch.nn.Module)]


def _shard_of(name: str, parameter: DTensor) -> tuple[int, int]:
    """The mesh's dimension along which the parameter is sharded, and the parameter's."""
    placements, mesh = parameter.placements, parameter.device_mesh
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(placements[sharded[0]]) is not Shard:
        dimensions = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        where = ", ".join(f"{dimensions[i]}: {placement}" for i, placement in enumerate(placements))
        raise ConfigError(
            f"parameter {name!r} is placed by mesh dimension as {where}: gradcomp compresses parameters that one mesh "
            "dimension shards, without tensor parallelism beside it"
        )
    shard = placements[sharded[0]]
    assert isinstance(shard, Shard), "looked at"
    return sharded[0], shard.dim


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
