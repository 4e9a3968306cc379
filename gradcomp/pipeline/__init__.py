"""Buckets through compressors and reductions, over one transport. No threads: whoever owns a pipeline polls it."""

from gradcomp.pipeline.inbox import Inbox
from gradcomp.pipeline.layout import Bucket, Layout, build_layout
from gradcomp.pipeline.pipeline import Pipeline, StepResult, Waiting
from gradcomp.pipeline.soon import Number, Soon

__all__ = ["Bucket", "Inbox", "Layout", "Number", "Pipeline", "Soon", "StepResult", "Waiting", "build_layout"]
