"""Losses, one equation per file: tensors to a scalar; hyper-parameters in the constructor."""

from .classification import SubspaceClassification, SubspaceSoftTargets
from .entropy import SubspaceEntropy
from .extra import ExtraLosses
from .npair import NPairPQLoss, SoftNPairLoss
from .triplet import TripletPQLoss

__all__ = [
    "ExtraLosses",
    "NPairPQLoss",
    "SoftNPairLoss",
    "SubspaceClassification",
    "SubspaceEntropy",
    "SubspaceSoftTargets",
    "TripletPQLoss",
]
