"""Small models that fully_shard shards in various ways, trained with and without compression."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradcomp.torch as gc

WIDTH = 37  # no multiple of 2, 3 or 4
EXACT = ("none", "none")
#: With small buckets, so that every parameter has several.
COARSE = (gc.Quantize(bits=6, bucket_size=64, rounding="shift"), gc.Quantize(bits=6, bucket_size=64))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.expand, self.contract = (
            nn.LayerNorm(width),
            nn.Linear(width, 70),
            nn.Linear(70, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.contract(functional.relu(self.expand(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, output layer; ``tied``: the last is the first. ``spare`` is used when it is asked for."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 41, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.use_spare = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.use_spare:
            x = x + self.spare(x)
        return self.head(self.norm(x))


@dataclass
class Case:
    """How a model is sharded and trained. ``shard``: if not by blocks. ``passes``: backward per step."""

    options: Callable[[], dict[str, Any]] = dict
    shard: Callable[[nn.Module, Any], None] | None = None
    prepare: Callable[[nn.Module], None] = lambda _: None
    tied: bool = False
    passes: int = 1
    sync_last: bool = False
    clip: bool = False
    spare: Callable[[int], bool] = lambda step: True
    mesh: Callable[[], Any] | None = None
    ranks: int | None = None


def by_blocks(model: Net, mesh: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def build(case: Case, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net(case.tied)
    mesh = case.mesh() if case.mesh else init_device_mesh("cpu", (gc.size(),))
    case.prepare(model)
    if case.shard is None:
        by_blocks(model, mesh, **case.options())
    else:
        case.shard(model, mesh)
    return model


@dataclass
class Trained:
    model: Net
    optimizer: torch.optim.Optimizer
    state: Any = None
    losses: list[float] = field(default_factory=list)


def loss_of(model: Net, step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + gc.rank())
    tokens = torch.randint(41, (5, 7), generator=generator)
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def train(case: Case, steps: int = 3, compress: tuple[Any, Any] | None = None, **options: Any) -> Trained:
    """Train from the same start; with ``compress``, weights' and gradients' compressors, under compress_fsdp."""
    model, kind = build(case), getattr(torch.optim, options.pop("optimizer", "AdamW"))
    trained = Trained(model, kind([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    if compress is not None:
        if options.pop("with_optimizer", True):
            options["optimizer"] = trained.optimizer
        trained.state = gc.compress_fsdp(model, *compress, **options)
    go_on(trained, case, range(steps))
    return trained


def go_on(trained: Trained, case: Case, steps: range) -> None:
    model = trained.model
    for step in steps:
        model.use_spare = case.spare(step)
        for micro in range(case.passes):
            if case.sync_last:
                model.set_requires_gradient_sync(micro == case.passes - 1)
            loss = loss_of(model, step, micro)
            loss.backward()
            trained.losses.append(loss.item())
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [
        p.to_local().detach().clone() if isinstance(p, DTensor) else p.detach() for p in model.parameters()
    ]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def decoded(model: nn.Module) -> str:
    """A digest of the weights that this rank computes with."""
    sha = hashlib.sha256()
    modules = [m for m in model.modules() if hasattr(m, "unshard")]
    for module in modules:
        module.unshard()
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                sha.update(parameter.detach().clone().float().numpy().tobytes())
        module.reshard()
    return sha.hexdigest()


def same_everywhere(value: str | float) -> bool:
    """Whether all ranks have the same."""
    found = [None] * gc.size()
    dist.all_gather_object(found, value)
    return len(set(found)) == 1


def two_hosts(*hosts: int) -> Callable[[int], dict[str, str]]:
    """What torchrun tells each rank: on which of two hosts it is. Both are this one."""
    port = functools.cache(free_port)

    def variables(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()),
            "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])), "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
            "GROUP_RANK": str(hosts[rank]), "GROUP_WORLD_SIZE": "2",
        }  # fmt: skip

    return variables


def _freeze(model: Net) -> None:
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].expand.bias.requires_grad_(False)


def _in_pairs(model: Net, mesh: Any) -> None:
    fully_shard([model.embedding, model.blocks[0]], mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def _against_their_order(model: Net, mesh: Any) -> None:
    fully_shard([model.head, model.norm, model.blocks[1]], mesh=mesh)
    fully_shard([model.spare, model.embedding], mesh=mesh)
    fully_shard(model, mesh=mesh)


def _after_a_forward(model: Net, mesh: Any) -> None:
    by_blocks(model, mesh)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))  # the root stays whole


def _as_columns(model: Net, mesh: Any) -> None:
    inner = 12 * gc.size()
    model.blocks[1].contract = nn.Sequential(nn.Linear(70, inner, bias=False), nn.Linear(inner, WIDTH))
    by_blocks(
        model,
        mesh,
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % gc.size() == 0 else Shard(0),
    )


def _prefetch(model: Net, mesh: Any) -> None:
    by_blocks(model, mesh)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def _sum_only(model: Net, mesh: Any) -> None:
    by_blocks(model, mesh)
    for module in [*model.blocks, model]:
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


def _wrapped(model: Net) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))


def _wrapped_units(model: Net, mesh: Any) -> None:
    by_blocks(model, mesh)
    _wrapped(model)


def _checkpointed(reentrant: bool) -> Callable[[Net], None]:
    """Each block checkpoints its own forward."""

    def prepare(model: Net) -> None:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)

    return prepare


def _compiled_blocks(model: Net, mesh: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    by_blocks(model, mesh)


def _compiled_and_wrapped(model: Net, mesh: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    by_blocks(model, mesh)


def _compiled(model: Net, mesh: Any) -> None:
    by_blocks(model, mesh)
    model.compile(backend="aot_eager")


def _mixed(param: torch.dtype | None, reduce: torch.dtype | None) -> Callable[[], dict[str, Any]]:
    return lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


CASES = {
    "by blocks": Case(),
    "as a whole": Case(shard=lambda model, mesh: fully_shard(model, mesh=mesh)),
    "modules together": Case(shard=_in_pairs),
    "modules together, in another order": Case(shard=_against_their_order),
    "after a forward": Case(shard=_after_a_forward),
    "columns": Case(shard=_as_columns),
    "tied": Case(tied=True),
    "frozen": Case(prepare=_freeze),
    "unused": Case(spare=lambda step: step != 1),
    "not resharded": Case(options=lambda: {"reshard_after_forward": False}),
    "bfloat16 weights": Case(options=_mixed(torch.bfloat16, torch.float32)),
    "bfloat16": Case(options=_mixed(torch.bfloat16, None)),
    "float16 gradients": Case(options=_mixed(None, torch.float16)),
    "micro-batches": Case(passes=2),
    "micro-batches, reduced once": Case(passes=2, sync_last=True),
    "clipped": Case(clip=True),
    "prefetched": Case(shard=_prefetch),
    "sums": Case(shard=_sum_only),
    "two meshes, micro-batches": Case(
        mesh=lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")), ranks=4, passes=2
    ),
    "resharded among two, micro-batches": Case(
        options=lambda: {"reshard_after_forward": 2}, ranks=4, passes=2
    ),
    "two meshes": Case(
        mesh=lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")), ranks=4
    ),
    "resharded among two": Case(options=lambda: {"reshard_after_forward": 2}, ranks=4),
}

#: Ways to run a model that change none of its numbers, with how often a step computes a block.
SAME_NUMBERS = {
    "wrapped blocks": (Case(prepare=_wrapped), 2),
    "wrapped units": (Case(shard=_wrapped_units), 2),
    "checkpoint": (Case(prepare=_checkpointed(False)), 2),
    "reentrant checkpoint": (Case(prepare=_checkpointed(True)), 2),
    "compiled blocks": (Case(shard=_compiled_blocks), 0),
    "compiled and wrapped blocks": (Case(shard=_compiled_and_wrapped), 0),
    "compiled, parts unused": (Case(shard=_compiled, spare=lambda step: step != 1), 0),
}
