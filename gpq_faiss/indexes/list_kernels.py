import numpy as np


def squared_norm(x):
    return np.square(x).sum()
