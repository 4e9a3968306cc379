"""Sparse compressors send some elements of each layer."""
