"""Logs at the start what runs and how much is compressed, in two lines; details are logged at level debug."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from gradcomp import kernels
from gradcomp.engine import Exchanger
from gradcomp.job.state import Runtime
from gradcomp.pipeline.layout import compressors_of
from gradcomp.version import __version__

if TYPE_CHECKING:
    from gradcomp.job.start import Proposal

logger = logging.getLogger("gradcomp")


def announce_job(runtime: Runtime) -> None:
    """Log once, on rank 0, what runs and which settings were changed. All settings are logged at level debug."""
    if runtime.rank != 0:
        return
    config, hosts = runtime.config, len(runtime.topology.leaders)
    changed = {name: value for name, value in config.changed().items() if name != "transport"}
    logger.info(
        "version %s, %d ranks on %d host%s by %s, transport %s%s",
        __version__,
        runtime.size,
        hosts,
        "s" * (hosts > 1),
        runtime.launch.launcher,
        config.transport,
        f", settings {_listed(changed)}" if changed else "",
    )
    if runtime.size == 1:
        logger.info("a world of one rank: nothing is exchanged, compression is bypassed")
    logger.debug(
        "interface %s, %s, kernels %s",
        runtime.launch.interface or "chosen by the system",
        runtime.network.describe(),
        kernels.body(),
    )
    logger.debug("settings in force: %s", _listed(config.settings()))


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def announce_compression(exchanger: Exchanger, proposal: Proposal) -> None:
    """Log once, on rank 0, how much is compressed, and warn of what was probably not intended."""
    pipeline, policy = exchanger.pipeline, proposal.policy
    if pipeline.transport.rank != 0:
        return
    excluded = policy.excluded(pipeline.layers)
    total = sum(layer.nbytes for layer in pipeline.layers) or 1
    compressed = sum(layer.nbytes for layer in pipeline.layers if layer.name not in excluded)
    why = ", ".join(f"{count} {reason}" for reason, count in Counter(excluded.values()).items()) or "none"
    if policy.compresses:
        logger.info(
            "%s: %.1f%% of %.2f MB in %d layers %s; %s: %s",
            _title(proposal),
            100 * compressed / total,
            total / 1e6,
            len(pipeline.layers),
            "may be compressed" if proposal.chooses_by_times else "compressed",
            "exact" if policy.exact == "float32" else policy.exact,
            why,
        )
    else:
        logger.info("%s: %.2f MB in %d layers, uncompressed", policy.brief, total / 1e6, len(pipeline.layers))
    if policy.compresses and not compressed:
        logger.warning(
            "nothing is compressed: every layer is excluded (%s). Policy(filter=Filter(...)) says which to compress",
            why,
        )
    for pattern in policy.unmatched(pipeline.layers):
        logger.warning(
            "the policy's pattern %r matches no layer; the first are %s",
            pattern,
            ", ".join(layer.name for layer in pipeline.layers[:3]),
        )
    _explain(exchanger)


def _title(proposal: Proposal) -> str:
    title, controller = proposal.policy.brief, proposal.controller
    return title if controller is None or controller.name == title else f"{title} under {controller.name}"


def _explain(exchanger: Exchanger) -> None:
    """Log the memory of the state and compressors' remarks on layers."""
    pipeline = exchanger.pipeline
    logger.debug(
        "state %.2f MB; %d buckets",
        (pipeline.residuals.nbytes + pipeline.fields.nbytes) / 1e6,
        len(pipeline.layout.buckets),
    )
    compressors = compressors_of(pipeline.layers, pipeline.plan)
    for layer, compressor in zip(pipeline.layers, compressors, strict=True):
        if remark := compressor.remark(layer):
            logger.debug("%s: %s", layer.name, remark)
