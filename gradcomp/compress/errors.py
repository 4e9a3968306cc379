import numpy as np


def errors(choices, layer, values, seed, *, memory_bytes=None):
    return np.array([np.linalg.norm(values) / (1 + i) for i in range(len(choices))])
