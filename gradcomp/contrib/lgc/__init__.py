"""LGC encodes the selected values with a small network that is trained together with the model."""
