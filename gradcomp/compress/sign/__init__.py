"""Sign compressors send one bit per value, its sign."""
