"""Compressors that send some elements of each layer."""
