"""Implements ``set_compression``, which changes the compression in the middle of a run, for every wrapper."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gradcomp.compress import Policy
from gradcomp.compress.policy import Automatic
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.engine import Exchanger
from gradcomp.job.checkpoint_manager import CheckpointManager
from gradcomp.job.learning import refusal
from gradcomp.pipeline.layout import compressors_of

logger = logging.getLogger("gradcomp")


def set_compression(
    checkpoint_manager: CheckpointManager,
    exchanger: Exchanger | None,
    layers: Sequence[LayerSpec],
    policy: Policy,
) -> None:
    """Change to ``policy`` on all ranks: see ``set_compression`` of what was wrapped. Local.

    In a world of one nothing is exchanged, and the policy is only checked. ConfigError for one that is impossible,
    StateError in the middle of a step.
    """
    if isinstance(policy, Automatic):
        raise ConfigError(
            'set_compression("auto"): a controller begins with the optimizer, not in mid-run; name a compressor'
        )
    checkpoint_manager.finish_step()
    step = checkpoint_manager.step
    plan = policy.plan(layers, step=step)
    compressors_of(layers, plan)
    if exchanger is None:
        return
    pipeline = exchanger.pipeline
    config = pipeline.config
    if problem := refusal(config, policy, pipeline.device, step):
        raise problem
    changes = sorted({change for c in policy.compressors for change in c.changes if change > step})
    pipeline.set_compression(plan, {later: policy.plan(layers, step=later) for later in changes})
    if pipeline.transport.rank == 0:
        logger.info("step %d: compression changes to %s", step, policy.title)
