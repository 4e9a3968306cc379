"""The kernels on a GPU, with their CUDA sources; NumPy defines what they compute, and the bytes are the same."""
