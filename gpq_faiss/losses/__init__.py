"""Losses, one idea a file: tensors to a scalar, hyper-parameters in the constructor."""

from .classification import SubspaceClassification
from .entropy import SubspaceEntropy
from .npair import NPairPQLoss
from .triplet import TripletPQLoss

__all__ = ["NPairPQLoss", "SubspaceClassification", "SubspaceEntropy", "TripletPQLoss"]
