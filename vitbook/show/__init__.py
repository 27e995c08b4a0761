"""Draws and judges plain tables and arrays: figures in one house style, the attention explorer, claims and verdicts."""

from vitbook.show.cards import claim_cards, provenance_line, scoreboard
from vitbook.show.claims import Claim, Verdict, half_interval, judge, load_claims, pooled_spread
from vitbook.show.explorer import Explorer
from vitbook.show.figures import (
    distance_entropy_plane,
    head_grid,
    heads_by_layer,
    layer_profile,
    new_figure,
    over_epochs,
    training_curves,
)
from vitbook.show.style import house_style, layer_colours, tidy

__all__ = [
    "Claim",
    "Explorer",
    "Verdict",
    "claim_cards",
    "distance_entropy_plane",
    "half_interval",
    "head_grid",
    "heads_by_layer",
    "house_style",
    "judge",
    "layer_colours",
    "layer_profile",
    "load_claims",
    "new_figure",
    "over_epochs",
    "pooled_spread",
    "provenance_line",
    "scoreboard",
    "tidy",
    "training_curves",
]
