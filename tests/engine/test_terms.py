"""What ranks refuse when they have agreed on their settings: all of them, or none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gradcomp import Config, ConfigError, LayerSpec, Quantize
from gradcomp.engine.terms import Terms, agree_on_terms
from gradcomp.testing.simulation import plan_for
from gradcomp.transport.base import Handle
from gradcomp.transport.inprocess import World

LAYERS = [LayerSpec("w", (64,))]
SERVED = "parameter_server:dedicated=true"


def wait_for(handle: Handle) -> None:
    while not handle.poll():
        pass


def agreed(terms: Terms, **settings: str) -> list[str]:
    """What every one of three ranks raises; empty if they agree."""
    plan, config = plan_for(LAYERS, Quantize(4)), Config(slice_elements=64, **settings)

    def agree(transport) -> str:
        try:
            agree_on_terms(LAYERS, plan, transport, config, terms, wait_for)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(agree, World(3).transports()))


@pytest.mark.parametrize(
    ("terms", "settings", "what"),
    [
        (Terms(needs_all="gradcomp.tf"), {}, "gradcomp.tf"),
        (Terms(), {"residuals": "bfloat16"}, "residuals='bfloat16'"),
    ],
)
def test_what_needs_all_ranks_to_train_is_refused_where_some_serve(terms: Terms, settings, what: str):
    refusal = f"{what} does not work with dedicated servers (reduction={SERVED})"
    assert agreed(terms, reduction=SERVED, **settings) == [refusal] * 3
    assert agreed(terms, **settings) == [""] * 3
    assert agreed(Terms(), reduction=SERVED) == [""] * 3
