"""LGC codes what is sent by a small network that is trained beside the model."""
