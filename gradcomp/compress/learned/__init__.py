"""Learned compressors code what is sent by a small network that is trained beside the model."""
