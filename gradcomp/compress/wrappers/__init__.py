"""Wrappers act around a compressor: momentum, clipping, feedback and schedules."""
