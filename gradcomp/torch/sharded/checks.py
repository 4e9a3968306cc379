"""Which compressors a sharded model can have, and which arguments go together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradcomp.compress import Cast, Compressor, Fake, Identity, Policy
from gradcomp.compress.policy import Automatic
from gradcomp.control.lgreco import LGreCo
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, check_suits
from gradcomp.torch.sharded.levels import check_points, codebook_of
from gradcomp.torch.sharded.lgreco import check_controller

if TYPE_CHECKING:
    from gradcomp.torch.sharded.units import Unit


def compressor(layer: LayerSpec, policy: Policy) -> Compressor:
    """Return the compressor of a layer, which travels uncompressed, or in bfloat16, if the policy excludes it."""
    chosen, reason = policy.choose(layer)
    if reason is None or chosen == Cast("bfloat16"):
        return chosen
    return Identity()


def check_policy(kind: str, layers: Iterable[LayerSpec], policy: Policy, *, by_hosts: bool = False) -> None:
    """Raise ConfigError unless requests of this kind can have the compressors of all layers, without residuals.

    For ``by_hosts`` see :func:`gradcomp.exchange.requests.check_suits`.
    """
    if isinstance(policy, Automatic):
        raise ConfigError(
            '"auto" chooses by the times of steps, which a sharded exchange does not measure: name a compressor'
        )
    for layer in layers:
        check_compressor(kind, layer, compressor(layer, policy), by_hosts=by_hosts)


def check_compressor(kind: str, layer: LayerSpec, chosen: Compressor, *, by_hosts: bool = False) -> None:
    """Raise ConfigError unless a request of this kind can have this compressor, without a residual."""
    check_suits(kind, layer, chosen, by_hosts=by_hosts)
    if chosen.traits.keeps_residual:
        raise ConfigError(
            f"{chosen.to_string()} keeps a residual. Of gradients it has the size of the whole model on all ranks, "
            "which sharding is meant to avoid; owners do not round their weights: use feedback=False"
        )


def check_arguments(
    units: Sequence[Unit],
    policies: Sequence[Policy],
    optimizer: Any,
    reuse: str | None,
    redraw: str,
    learn_levels: Sequence[int],
    hierarchical: bool | None,
    controller: LGreCo | None,
) -> None:
    """Raise ConfigError for arguments that cannot work."""
    if reuse not in (None, "codes"):
        raise ConfigError(f"reuse must be 'codes' or None, got {reuse!r}")
    if redraw not in ("step", "gather"):
        raise ConfigError(f"redraw must be one of step, gather, got {redraw!r}")
    if reuse and redraw != "step":
        raise ConfigError(
            "reuse='codes' keeps the codes of a step, and redraw='gather' draws new ones: choose one"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hierarchical is not None and not isinstance(hierarchical, bool):
        raise ConfigError(f"hierarchical must be True, False or None, got {hierarchical!r}")
    if controller is not None:
        check_controller(controller)
        if optimizer is None:
            raise ConfigError("controller= decides by the optimizer's steps: pass optimizer= too")
        if learn_levels:
            raise ConfigError(
                "controller= changes bits, and learn_levels= learns levels of fixed bits: pass one"
            )
        if len({unit.ranks for unit in units}) > 1:
            raise ConfigError("controller= has one budget for the model: all units must have the same ranks")
    unlearned = check_points(learn_levels, has_optimizer=optimizer is not None)
    specs = [one.spec(one.current.dtype) for unit in units for one in unit.parameters]
    for kind, policy in zip((ALL_GATHER, REDUCE_SCATTER), policies, strict=True):
        if isinstance(policy.default, Fake):
            if policy.overrides:
                raise ConfigError(
                    "compress_fsdp fakes all parameters of a unit or none: leave the overrides out"
                )
            continue
        check_policy(kind, specs, policy, by_hosts=bool(hierarchical))
        unlearned = unlearned and all(
            codebook_of(kind, layer, compressor(layer, policy)) is None for layer in specs
        )
    if unlearned:
        raise ConfigError(
            "learn_levels: no layer of more than 100,000 elements is quantised between minimum and maximum to at most "
            "7 bits; choose Quantize(bits=5, ...) for weights= or gradients=, or leave learn_levels out"
        )
    if any(a >= b for unit in units for a, b in zip(unit.ranks, unit.ranks[1:], strict=False)):
        raise ConfigError("the mesh's ranks must be in ascending order: make the DeviceMesh so")
    if not all(hasattr(module, "set_custom_reduce_scatter") for unit in units for module in unit.modules):
        raise ConfigError(
            f"fully_shard of torch {torch.__version__} takes no custom collectives; use torch 2.13 or newer"
        )
