"""Kernels work on a table of segments and serve a whole group per call; each device has its own."""
