"""The transport that the settings name, made for some of the ranks."""

from __future__ import annotations

from gradcomp.torch.runtime import Ranks, Runtime
from gradcomp.transport.base import Transport


def make_transport(state: Runtime, ranks: Ranks) -> Transport:
    """A communicator of its own for an exchanger; collective over ``ranks``."""
    return state.make_group(ranks)
