"""Losses, one per file: tensors to a scalar; hyper-parameters in the constructor."""

from .classification import SubspaceClassification
from .entropy import SubspaceEntropy
from .extra import ExtraLosses
from .npair import NPairPQLoss
from .soft_npair import SoftNPairLoss
from .soft_targets import SubspaceSoftTargets
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
