"""Measurements of the error of compressors on a layer, for controllers, apart from training."""
