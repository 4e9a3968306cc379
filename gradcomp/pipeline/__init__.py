"""Exchange buckets pass through compressors and reductions over one transport.

No module here starts a thread: the owner of a pipeline polls it.
"""

from gradcomp.pipeline.gradient_registry import GradientRegistry, Submission
from gradcomp.pipeline.in_flight import Waiting
from gradcomp.pipeline.layout import Bucket, Layout, build_layout
from gradcomp.pipeline.options import Options
from gradcomp.pipeline.pipeline import Pipeline
from gradcomp.pipeline.result import StepResult
from gradcomp.pipeline.soon import Number, Soon

__all__ = [
    "Bucket",
    "GradientRegistry",
    "Layout",
    "Number",
    "Options",
    "Pipeline",
    "Soon",
    "StepResult",
    "Submission",
    "Waiting",
    "build_layout",
]
