"""The toy world of source D: its data law, its one-layer model, its training, and its dynamics in three numbers."""

from vitbook.theory.dynamics import reduced_dynamics
from vitbook.theory.model import Diverged, LinearModel, PositionalAttentionModel, generaliser
from vitbook.theory.scores import association
from vitbook.theory.training import History, train, transfer
from vitbook.theory.world import GaussianPatchData, PatchAssociationData

__all__ = [
    "Diverged", "GaussianPatchData", "History", "LinearModel", "PatchAssociationData", "PositionalAttentionModel",
    "association", "generaliser", "reduced_dynamics", "train", "transfer",
]  # fmt: skip
