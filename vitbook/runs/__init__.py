"""Joins data, models and measures into experiments, and keeps what they left."""

from vitbook.runs.records import NotRecorded, Record, minutes, obtain, obtain_many
from vitbook.runs.spec import DESK, PAPER, SMOKE, Profile, Recipe, Run, changed, choose
from vitbook.runs.store import DamagedRecord, recording, remember
from vitbook.runs.training import NonFiniteLoss, fit

__all__ = [
    "DESK", "PAPER", "SMOKE", "DamagedRecord", "NonFiniteLoss", "NotRecorded", "Profile", "Recipe", "Record", "Run",
    "changed", "choose", "fit", "minutes", "obtain", "obtain_many", "recording", "remember",
]  # fmt: skip
