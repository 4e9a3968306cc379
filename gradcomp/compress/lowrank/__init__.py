"""Compressors that see layers as matrices and send factors of low rank."""
