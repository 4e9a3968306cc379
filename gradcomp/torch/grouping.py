"""``num_groups`` and ``groups``, Horovod's arguments about which gradients travel together."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gradcomp.core.errors import ConfigError


def groups_of(num_groups: Any, groups: Any) -> Any:
    """Return ``groups``, or ``num_groups``, its older spelling, with a warning as Horovod gives it."""
    if isinstance(num_groups, int) and num_groups == 0:
        return groups
    warnings.warn(
        "num_groups is the older spelling of groups; give groups=", DeprecationWarning, stacklevel=3
    )
    return num_groups if groups is None else groups


def check_groups(groups: Any) -> None:
    """Raise ConfigError unless this is None, a number from 0, or lists of tensors without repetitions.

    The argument has no effect: layers are laid out in exchange buckets of ``slice_elements`` values in the
    order in which their gradients come, and the means of all of them are applied together.
    """
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise ConfigError(
            f"groups must be a non-negative integer or a list of lists of tensors, got {groups!r:.80}"
        )
    members = [member for group in groups for member in group]
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise ConfigError(f"groups must consist of tensors, got {type(member).__name__}")
    if len({id(member) for member in members}) < len(members):
        raise ConfigError("a parameter can only appear once in groups")
