"""The kernels on a GPU: the sources lie here, NumPy defines what they compute, and the bytes are the same."""
