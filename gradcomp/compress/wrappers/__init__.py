"""Wrappers: what acts around a compressor, as momentum, clipping, feedback and schedules."""
