"""One house style for every figure, colour-blind safe, quiet, on paper of its own; and for every table."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.colors import Colormap

# Okabe & Ito's palette without its yellow, which is lost on light paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
PAPER, INK, QUIET = "#FBFAF7", "#2B2B2B", "#6F6F6F"
WIDTH = 7.2  # inches: the column of the book


def house_style() -> None:
    """Apply the book's style to matplotlib's `rcParams`, for the rest of the session.

    Figures bring their own light paper and margins, so one image reads on the light and on the dark page.
    """
    mpl.rcParams.update(
        {
            "figure.dpi": 144,
            "figure.figsize": (WIDTH, 3.4),
            "figure.facecolor": PAPER,
            "savefig.facecolor": PAPER,
            "savefig.dpi": 144,
            "savefig.bbox": "tight",
            "savefig.pad_inches": 0.15,
            "axes.facecolor": PAPER,
            "axes.edgecolor": QUIET,
            "axes.linewidth": 0.8,
            "axes.labelcolor": INK,
            "axes.labelsize": 9,
            "axes.titlesize": 9.5,
            "axes.titlelocation": "left",
            "axes.titlecolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(linestyle=["-", "--"]) * cycler(color=PALETTE),
            "axes.grid": False,
            "font.size": 9,
            "text.color": INK,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "legend.title_fontsize": 8,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
            "image.cmap": "inferno",
            "image.interpolation": "nearest",
        }
    )


def layer_colours(layers: int) -> Colormap:
    """Colours for `layers` ordered layers, shallow to deep: viridis without the end that fades into the paper."""
    return mpl.colors.ListedColormap(mpl.colormaps["viridis"](np.linspace(0.0, 0.75, layers)))


def tidy(table: pd.DataFrame, digits: int = 2) -> pd.DataFrame:
    """A table for the page: a column in as many decimals as it needs, at most `digits`; a dash for what is missing."""
    return table.apply(lambda column: _written(column, digits))


def _written(column: pd.Series, digits: int) -> pd.Series:
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return column.astype(object).where(column.notna(), "–")
    exact = column.dropna().map(lambda value: f"{value:.{digits}f}".rstrip("0"))
    needed = exact.map(lambda text: len(text.partition(".")[2])).max() if len(exact) else 0
    return column.map(lambda value: "–" if pd.isna(value) else f"{round(float(value), needed) + 0.0:.{needed}f}")
