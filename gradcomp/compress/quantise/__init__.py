"""Compressors that code every value in few bits: casts, quantisers, codebooks."""
