"""Compressors that send one bit per value, its sign."""
