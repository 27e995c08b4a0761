# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What makes heads local? CutMix, taken apart

# %% tags=["colab", "remove-cell"]
# In Colab a chapter arrives alone: fetch the rest of the book, records included, and install its package beside the
# torch that is there. Elsewhere this cell does nothing. `make pair` writes it, with the book's public address.
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

repository, branch = "", "main"
in_colab = importlib.util.find_spec("google") and importlib.util.find_spec("google.colab")
if in_colab and not os.path.exists("../pyproject.toml"):
    if not repository:
        raise RuntimeError("this copy names no public address: set Repository in pyproject.toml, then `make pair`")
    if not os.path.exists("vitbook-book"):  # it is there after a restart of the session
        subprocess.run(["git", "clone", "-q", "--depth=1", "-b", branch, repository, "vitbook-book"], check=True)
    os.chdir("vitbook-book/notebooks")
    with open("../keep.txt", "w") as keep:
        keep.writelines(f"{name}=={version(name)}\n" for name in ("torch", "torchvision"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", "../keep.txt", "-e", ".."], check=True)
    sys.path.insert(0, os.path.abspath(".."))

# %% tags=["remove-input"]
from IPython.display import Markdown, display

answer = display(Markdown("*The answer stands here once the chapter has run.*"), display_id="answer")

# %% [markdown]
# | | |
# | - | - |
# | **question** | Of AutoAugment, CutMix and label smoothing: which makes heads look nearby, and why that one? |
# | **claim under test** | source A {cite:p}`santiago2026cutmix`: CutMix does, alone; the other two do nothing of the kind |
# | **its numbers** | nearest head 0.316 without any, 0.008 with all; ≤ 0.024 in all four recipes with CutMix, ≥ 0.210 without |
# | **what is run** | all eight recipes from two or three seeds each, then controls that take CutMix to pieces |
# | **to take home** | how far to trust a minimum over heads; and a treatment is not its cause until its parts are tried |
#
# Chapter 02 measured one model that was trained with CutMix, chapter 03 a ladder with CutMix on one rung. Neither could
# tell what CutMix did. Here it is switched on and off with everything else fixed, and then cut up itself: a partial
# view, a mixed label, a stranger's pixels. Distances are divided by the largest distance between two patches; a head that
# looks everywhere alike then reads 0.418. Source A's unit is not known to us; its numbers fit this one, or another length
# of about the grid's size.

# %% tags=["parameters", "hide-input"]
profile: str = "desk"
train: bool = False  # True: train what is not recorded

# %% tags=["hide-input"]
from dataclasses import replace
from itertools import product
from math import log, sqrt

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from vitbook.data import SETS, Augment, load_or_shapes
from vitbook.measures.heads import neighbours, patch_distances
from vitbook.models.vit import ViTConfig
from vitbook.runs import Profile, Recipe, Run, changed, choose, minutes, obtain_many
from vitbook.show import distance_entropy_plane, half_interval, house_style, new_figure
from vitbook.show import over_epochs, pooled_spread, tidy, training_curves

house_style()

# %% [markdown]
# ## Eight recipes
#
# Source A compares two protocols, *Baseline* and *Modern*: crop and mirror, and the same with AutoAugment
# {cite:p}`cubuk2019autoaugment`, CutMix {cite:p}`yun2019cutmix` and label smoothing {cite:p}`szegedy2016inception` on
# top. Then it tries all $2^3$ combinations of the three. So do we; each recipe has the name that source A gives it: +X is
# Baseline with X alone, −X is Modern without X. Each of the eight is a *cell*; whatever is trained on this page, cell or
# control, is an *arm*.

# %%
baseline = Run(
    "cifar100",
    ViTConfig(),  # source A's: 8 layers × 192, 8 heads, MLP ratio 2, 8 × 8 patches
    Recipe(
        epochs=200, batch=256, lr=1e-3, warmup=10, min_lr=1e-5, clip=1.0,
        augment=Augment(mix_p=0.5),
    ),
)  # fmt: skip
factors = {
    "AutoAugment": {"policy": "cifar10"},
    "CutMix": {"cutmix": 1.0},
    "smoothing": {"smoothing": 0.1},
}  # fmt: skip
names = {
    (0, 0, 0): "Baseline", (1, 1, 1): "Modern",
    (1, 0, 0): "+AutoAugment", (0, 1, 1): "−AutoAugment",
    (0, 1, 0): "+CutMix", (1, 0, 1): "−CutMix",
    (0, 0, 1): "+Label Smoothing", (1, 1, 0): "−Label Smoothing",
}  # fmt: skip


# %%
def mixed(run: Run, **fields) -> Run:
    """A run with other augmentation."""
    paths = {f"recipe.augment.{name}": value for name, value in fields.items()}
    return changed(run, paths)


cells = {}
for key, name in names.items():
    parts = [part for on, part in zip(key, factors.values(), strict=True) if on]
    cells[name] = mixed(baseline, **{k: v for part in parts for k, v in part.items()})

# %% [markdown]
# Only the abstract and a digest of the paper could be read. Depth, width and heads are stated, and 2.4 M parameters fix
# the MLP ratio; of optimiser and schedule we know only that they are the same in all cells. The recipe above is
# therefore ours, pieced together from what others do with models
# of this kind {cite:p}`lee2021small,touvron2021deit`: AdamW {cite:p}`loshchilov2019adamw`, 200 epochs, CutMix on half
# of the batches. Everything but the three factors is the same in all eight cells, warmup included, for chapter 03's
# source holds that warmup moves the local layer by itself.
#
# ## The controls
#
# CutMix pastes a box of one image into another and shares the label by area. That is at least three things at once: a
# partial view, a stranger's pixels, a mixed label. Source A's explanation is the first: who must name an image from part
# of it learns to use small neighbourhoods. Each control keeps some and drops the others; those that cut use the same
# boxes.

# %%
cutmix = cells["+CutMix"]
alone = {"model.attention": "masked-diagonal"}
pooled = {"model.pool": "mean", "model.cls_token": False}
controls = {
    "+MixUp": mixed(baseline, mixup=1.0),  # mixed labels, nothing cut
    "Cutout": mixed(cutmix, cut="erase"),  # a part is missing; nothing mixed
    "major label": mixed(cutmix, cut="major"),  # CutMix's pixels, the larger part's label
    "label only": mixed(cutmix, cut="labels"),  # CutMix's labels, pixels untouched
    "shuffled box": mixed(cutmix, cut="shuffle"),  # own patches change places; nothing mixed
    "Baseline, no self": changed(baseline, alone),
    "+CutMix, no self": changed(cutmix, alone),
    "Baseline, half the rate": changed(baseline, {"recipe.lr": 5e-4}),
    "+CutMix, half the rate": changed(cutmix, {"recipe.lr": 5e-4}),
    "Baseline, mean pool": changed(baseline, pooled),
    "+CutMix, mean pool": changed(cutmix, pooled),
    "+CutMix, other share": mixed(cutmix, mix_p=1.0),  # at desk, where every batch is mixed: half of them
}

# %% [markdown]
# | control | part of the image hidden | pixels of a stranger | mixed label |
# | - | - | - | - |
# | +CutMix | yes | yes | yes |
# | Cutout {cite:p}`devries2017cutout` | yes | no | no |
# | major label | yes | yes | no |
# | label only | no | no | yes |
# | +MixUp {cite:p}`zhang2018mixup` | no | yes, all over | yes |
# | shuffled box | no, but out of place | no | no |
#
# *No self* forbids every token to look at itself. If a near head is near because it stares at its own patch, it has to
# find something else to do. *Mean pool* has no CLS token. *Half the rate* asks whether an effect belongs to one learning
# rate, *other share* mixes half of the batches. Two more arms keep the number of steps and change the number
# of images, and twelve runs of Baseline and +CutMix tell how much of a difference is chance.
#
# ## The scale of this page

# %%
schedule = 50  # epochs; how it is chosen is told below
small = {
    "limit": 25_000, "model.dim": 64, "model.depth": 6, "model.heads": 4,
    "recipe.epochs": schedule, "recipe.warmup": 5, "recipe.batch": 64,
    "recipe.lr": lambda rate: 3 * rate, "recipe.min_lr": 0.0, "recipe.clip": None,
    "recipe.augment.mix_p": lambda p: 1.5 - p,  # every batch; in one arm, half
}  # fmt: skip
tiny = {
    "data": "shapes", "limit": 128, "model.image": 32, "model.patch": 8,
    "model.classes": 10, "model.dim": 16, "model.depth": 2, "model.heads": 2,
    "recipe.epochs": 2, "recipe.warmup": 0, "recipe.batch": 64, "recipe.lr": 3e-3,
    "recipe.augment.crop": 4, "recipe.augment.mix_p": 1.0,
}  # fmt: skip
desk = Profile("desk", small)
scale = choose(profile, desk, Profile("smoke", tiny))
scale.differences(cutmix).drop(index="seeds")  # those follow below


# %%
def equal_steps(run: Run, factor: float) -> Run:
    """As many steps on more or fewer images, and as nearly as whole epochs allow as many of warmup."""
    whole = SETS[run.data].train_images
    images = int(factor * (run.limit or whole))
    times = {f"recipe.{part}": lambda n: round(n / factor) for part in ("epochs", "warmup")}
    return changed(run, {"limit": None if images == whole else images} | times)


arms = {name: scale.scale(run) for name, run in (cells | controls).items()}
arms["Baseline, half the images"] = equal_steps(arms["Baseline"], 0.5)
if arms["Baseline"].limit:
    arms["Baseline, twice the images"] = equal_steps(arms["Baseline"], 2)
lengths = {50: "short", 100: "long"} if scale.name == "desk" else {}
for epochs, word in lengths.items():
    for name in ("Baseline", "+CutMix"):
        arms[f"{name}, {word}"] = changed(arms[name], {"recipe.epochs": epochs})

# %% [markdown]
# And the other two data sets of source A. Of Tiny-ImageNet, 25 of its 200 classes at `desk`, all their images; there
# ColorJitter stands in AutoAugment's place, as in the source, and patches have 8 px, so that all grids are 8 × 8.

# %%
tiny_imagenet = {"data": "tiny-imagenet", "model.image": 64, "model.patch": 8}
tiny_imagenet |= {"model.classes": 200, "recipe.augment.crop": 8, "recipe.augment.policy": None}
part = {"data": "tiny-imagenet-25", "limit": None, "model.classes": 25}
part |= {"recipe.epochs": 2 * schedule, "recipe.warmup": lambda n: 2 * n}  # 12,500 images: as many steps
others = ("CIFAR-10", "Tiny-ImageNet")
for name in ("Baseline", "+CutMix", "Modern"):
    run = changed(cells[name], {"data": "cifar10", "model.classes": 10})
    arms[f"{name}, CIFAR-10"] = scale.scale(run)
    jitter = {"recipe.augment.jitter": 0.4 if name == "Modern" else 0.0}
    run = scale.scale(changed(cells[name], tiny_imagenet | jitter))
    arms[f"{name}, Tiny-ImageNet"] = changed(run, part) if scale.name == "desk" else run

# %% [markdown]
# Seeds, and the order in which runs are made: first those that tell the noise, then the cells, then the controls.

# %%
seeds = dict.fromkeys(arms, (0,))
if scale.name == "desk":
    seeds |= dict.fromkeys(cells, (0, 1))
    three = [f"{name}, {word}" for word in lengths.values() for name in ("Baseline", "+CutMix")]
    seeds |= dict.fromkeys(["Baseline", "+CutMix", "Modern", "+MixUp", *three], (0, 1, 2))
last = ("label only", "shuffled box", "+CutMix, other share")
order = [name for name in arms if name.endswith(("short", "long"))] + list(cells)
order += [name for name in arms if name not in (*order, *last)] + list(last)
runs = {(name, n): replace(arms[name], seed=n) for name in order for n in seeds[name]}
records = obtain_many(runs.values(), train=train or scale.name == "smoke", partial=True)
done = {key: run for key, run in runs.items() if run in records}

# %% [markdown]
# What it costs, estimated from floating-point operations: one run of each kind, and all runs of this page together.
# For `paper`, what a GPU would need if it sustained 10 or 100 TFLOP/s. This model reaches 16 % of the matmul peak of our
# CPU (*The machine and the clock*); at that share a T4 (peak 65 in float16) would sustain 10, and an H200 (990 in
# bfloat16) 160. Of a large GPU a model 192 wide will reach less; we had none at hand to measure how much.

# %% tags=["hide-input"]
factorial = [cells[name] for name in names.values()]
at = {"10 TFLOP/s": 1e13, "100 TFLOP/s": 1e14}
costs = {"desk, a core: Baseline": minutes(desk.scale(baseline))}
costs[f"{scale.name}, a core: this page"] = sum(minutes(run) for run in dict.fromkeys(runs.values()))
for name, rate in at.items():
    costs[f"paper, {name}: Baseline"] = minutes(baseline, rate)
    costs[f"paper, {name}: all eight cells"] = sum(minutes(run, rate) for run in factorial)
pd.Series(costs, name="minutes").round(1).to_frame()

# %% [markdown]
# ## What is measured
#
# Of every head: distance, entropy, and the three masses of chapter 02. Of every run, then, several numbers that
# compete for the title of "locality":
#
# - the **nearest head**: the smallest distance, the only one of which we know source A's values;
# - the **10 % quantile** over heads, and the number of heads **below half** of the uniform distance;
# - the mean over **all heads**, of the distance and of the weight on the eight neighbours;
# - the mean of the **first layer**, which source A counts as layer 1 and this book as layer 0, and of the **last**.
#
# Beside them the accuracy, and the *clean loss*: that on 2,000 fixed training images, not augmented, with hard labels.
# All are measured on the way, too, at the *milestones* of every record: epochs 1, 2, 3, 5, 8, 10, 15, 20, 30, ….

# %% tags=["hide-input"]
config = arms["Baseline"].model
grid = config.grid
uniform = patch_distances(grid, "max").mean().item()
T = 1 + grid[0] * grid[1]
touching = neighbours(grid).double().sum(1).mean().item()  # neighbours of a patch: fewer than 8 at the border
assert round(uniform, 4) == 0.4178 or scale.name == "smoke"  # whose patches are coarse


def quantities(record, epoch: int | None = None) -> dict[str, float]:
    """What this chapter asks of one run at one epoch."""
    heads = record.heads(epoch, "max")
    layers, near = heads.groupby("layer").distance.mean(), heads.loc[heads.distance.idxmin()]
    low = heads.distance
    found = {"nearest head": near.distance, "10 % quantile": low.quantile(0.1), "below half": (low < uniform / 2).sum()}
    found |= {"all heads": low.mean(), "neighbours": heads.neighbours.mean()}
    found |= {"first layer": layers.iloc[0], "last layer": layers.iloc[-1], "nearest layer": layers.idxmin()}
    found |= {"its layer": near.layer, "its head": near["head"], "its entropy": near.entropy}
    return found | {"its self": near["self"], "its CLS": near.cls, "its neighbours": near.neighbours}


# %% tags=["hide-input"]
def course(record) -> pd.DataFrame:
    """The same at every milestone, with accuracy (%) and the loss on 2,000 clean training images."""
    rows = [quantities(record, row["epoch"]) | {"epoch": row["epoch"]} for row in record.measures]
    table = pd.DataFrame(rows)
    table["accuracy"] = [100 * row["accuracy"] for row in record.measures]
    return table.assign(**{"clean loss": [row["clean_loss"] for row in record.measures]})


courses = {key: course(records[run]) for key, run in done.items()}
index = pd.MultiIndex.from_tuples(list(done), names=["arm", "seed"])
columns = ["accuracy", "clean loss", "nearest head", "10 % quantile", "below half", "all heads", "neighbours"]
columns += ["first layer", "last layer", "nearest layer", "its layer", "its head", "its entropy"]
columns += ["its self", "its CLS", "its neighbours"]
results = pd.DataFrame([table.iloc[-1] for table in courses.values()], columns=columns, dtype=float).set_axis(index)
missing = Markdown(
    "*Nothing to show yet: the runs for this are still being recorded.*"
    if scale.name == "desk"
    else f"*Nothing to show at the scale of {scale.name}, where these runs are not made.*"
)


def of(arm: str, measure: str) -> pd.Series:
    """One value a seed; empty when nothing is recorded."""
    return results.loc[arm, measure] if arm in index.get_level_values("arm") else pd.Series(dtype=float)


# %% [markdown]
# ## First the noise
#
# Source A has one seed. Before any comparison: how far apart are two runs that differ in nothing but the seed? Baseline
# and +CutMix, three seeds each, at 50 epochs and at 100.

# %% tags=["hide-input"]
judged = ["nearest head", "10 % quantile", "first layer", "all heads", "neighbours", "accuracy"]


def contrast(measure: str, word: str) -> dict[str, float]:
    """Baseline against +CutMix at one schedule: what differs, how much seeds scatter, and the price of knowing."""
    groups = {w: [of(f"{name}, {w}", measure) for name in ("Baseline", "+CutMix")] for w in lengths.values()}
    both = [group for pair in groups.values() for group in pair]
    own, common = (pooled_spread(g)[0] if all(len(v) > 1 for v in g) else np.nan for g in (groups[word], both))
    one, other = (group.mean() for group in groups[word])
    signal = abs(other - one) / common
    return {
        "Baseline": one, "+CutMix": other, "effect": other - one, "s over seeds": own, "|effect| / common s": signal,
        "(effect / s)² an hour": 60 * signal**2 / minutes(arms[f"Baseline, {word}"]),
    }  # fmt: skip


noise = pd.DataFrame({(m, word): contrast(m, word) for m in judged for word in lengths.values()}).T
tidy(noise, 3) if len(noise) else missing

# %% [markdown]
# How to read the last column. With $n$ runs an arm, the standard error of a difference falls as $1/\sqrt n$, so what an
# hour of computing buys is (effect / s)² per hour. Four degrees of freedom cannot tell whether seeds scatter more at one
# schedule than at the other (the true spread may be anything from 0.6 to 2.9 times $s$), so the last two columns take one
# $s$ from all twelve runs, and what is left to differ is the effect and the price. **The rule, fixed before any of these
# runs was looked at: the factorial uses the schedule that has more of it in the mean over all heads; where 95 % intervals
# cannot tell which one has, the short one, which leaves room for more controls.** The nearest head is listed for
# comparison, not for the choice.


# %% tags=["hide-input"]
def choice() -> str:
    """The rule applied: is the long schedule ahead in what a unit of computing buys, by more than chance?"""
    table, price = noise.loc["all heads"], [minutes(arms[f"Baseline, {word}"]) for word in lengths.values()]
    groups = [of(f"{name}, {word}", "all heads") for word in lengths.values() for name in ("Baseline", "+CutMix")]
    gain = [abs(effect) * sqrt(min(price) / p) for effect, p in zip(table["effect"], price, strict=True)]
    half = half_interval(pooled_spread(groups), 3, 3) * sqrt(sum(min(price) / p for p in price))
    lead, low = gain[1] - gain[0], table["|effect| / common s"]
    word = "long" if lead > half else "short"
    near = noise.loc["nearest head", "|effect| / common s"]
    return (
        f"At equal cost, the effect of the long schedule is larger than that of the short one by {lead:+.4f} ± "
        f"{half:.4f}. By the rule: the **{word}** schedule; this page uses {schedule} epochs. On all heads the effect is "
        f"{low['short']:.1f} and {low['long']:.1f} spreads (short and long), on the nearest head {near['short']:.1f} and "
        f"{near['long']:.1f}."
    )


decided = len(noise) and noise.loc["all heads", "(effect / s)² an hour"].notna().all()
waits = f"*The runs for this choice are not all there yet; the page stands at {schedule} epochs.*" if lengths else ""
Markdown(choice() if decided else waits)


# %% [markdown]
# ## The eight cells

# %% tags=["hide-input"]
printed = {"Baseline": "0.316", "+AutoAugment": "≈ 0.316", "+Label Smoothing": "≈ 0.316", "−CutMix": "0.210*"}
printed |= dict.fromkeys(("+CutMix", "−AutoAugment", "−Label Smoothing"), "≤ 0.024") | {"Modern": "0.008"}
ordered = [name for key, name in sorted(names.items(), key=lambda pair: (pair[0][1], pair[0]))]
shown = ["accuracy", "nearest head", "10 % quantile", "below half", "all heads", "neighbours"]
table = results[shown].groupby("arm").mean().reindex(ordered).rename_axis(None).round({"accuracy": 1, "below half": 1})
counts = results.groupby("arm").size().reindex(ordered, fill_value=0)
table.insert(0, "n", counts)
table.insert(2, "source A", pd.Series(printed))
tidy(table, 3)

# %% [markdown]
# Means over $n$ seeds; *source A* has its values of the nearest head. \* by elimination: source A says that AutoAugment alone and smoothing alone change next to
# nothing and that the smallest value without CutMix is 0.210, so that must be the two together. To read "no effect
# without CutMix" would then hide a drop by a third, which is why all eight cells are printed here. A head that looks everywhere alike reads
# 0.418 in the columns of distances, and 0.101 in the last. Layer by layer, in the mean over heads and seeds:

# %% tags=["hide-input"]
by_layer = {
    name: pd.concat(records[run].heads(unit="max") for (arm, _), run in done.items() if arm == name)
    for name in ordered
    if counts[name]
}
by_layer = {name: heads.groupby("layer").distance.mean() for name, heads in by_layer.items()}
tidy(pd.DataFrame(by_layer).T, 3) if by_layer else missing

# %% [markdown]
# The nearest head of each cell, seed by seed: where it is, and what it looks at. Source A reads its 0.008 as attention
# to the neighbourhood; arithmetic says that such a head, in our unit, keeps at least 92 % of its weight on the patch
# itself (or, if CLS is dropped without dividing by what is left, on the patch and CLS together; chapter 02). Below the cells, four arms that cannot do one of the two things which a near head may do instead of
# looking at neighbours: those without self may not stare at their own patch, those with mean pooling have no CLS.

# %% tags=["hide-input"]
looks = ["nearest head", "its layer", "its head", "its entropy", "its self", "its CLS", "its neighbours"]
listed = [*ordered, *(f"{name}, {kind}" for kind in ("no self", "mean pool") for name in ("Baseline", "+CutMix"))]
mine = [(name, seed) for name in listed for seed in seeds[name] if (name, seed) in done]
nearest = results.loc[mine, looks] if mine else pd.DataFrame()
even = {
    "nearest head": uniform,
    "its entropy": log(T),
    "its self": 1 / T,
    "its CLS": 1 / T,
    "its neighbours": touching / T,
}
N = T - 1
no_self = {
    "nearest head": uniform * N / (N - 1), "its entropy": log(T - 1), "its self": 0, "its CLS": 1 / (T - 1),
    "its neighbours": touching / (T - 1),
}  # fmt: skip
even = {("looking everywhere", ""): even, ("looking everywhere but at itself", ""): no_self}
table = pd.concat([nearest, pd.DataFrame(even).T])
tidy(table.astype(dict.fromkeys(looks[1:3], "Int64")), 3) if mine else missing


# %% tags=["hide-input"]
def on_neighbours(kind: str) -> str:
    """Of Baseline and of +CutMix, what the nearest head gives its neighbours, in the mean over seeds."""
    both = (of(f"{name}{kind}", "its neighbours") for name in ("Baseline", "+CutMix"))
    return " and ".join("–" if group.empty else f"{group.mean():.2f}" for group in both)


forbidden = {"of the cells": "", "without self": ", no self", "without CLS": ", mean pool"}
told = "; ".join(f"{which} {on_neighbours(kind)}" for which, kind in forbidden.items())
Markdown(f"Weight of the nearest head on the neighbours, Baseline and +CutMix: {told}.")

# %% mystnb={"figure": {"caption": "Every head of every cell, seed 0, in source A's plane: near and selective at the lower left, everywhere at the cross. The upper row is without CutMix, below each panel the same recipe with it. In which layers do heads leave the cross, and does the lower row do so more?", "name": "fig-cutmix-plane"}, "image": {"alt": "Eight scatter plots of attention entropy over distance, one a recipe, a dot a head coloured by layer."}} tags=["hide-input"]
planes = {name: records[done[name, 0]].heads(unit="max") for name in ordered if (name, 0) in done}
all_eight = len(planes) == len(ordered)
distance_entropy_plane(planes, uniform=(uniform, log(T)), label="distance / largest") if all_eight else missing

# %% [markdown]
# ## Effects
#
# Eight cells tell more than four pairs. The *main effect* of a factor is the mean of the four cells with it less the
# mean of the four without; an *interaction* of two is half of the difference that one makes to the effect of the other.
# Both are contrasts, sums over cells of the cell's mean times $\pm\tfrac14$, with
#
# $$
# \mathrm{s.e.} = \tfrac14\, s \sqrt{\textstyle\sum_c 1/n_c}, \qquad
# s^2 = \frac{\sum_c \sum_r (y_{cr} - \bar y_c)^2}{\sum_c (n_c - 1)},
# $$
#
# where $n_c$ is the number of seeds of cell $c$ and $s$ the spread over seeds, pooled over the cells. The interval is
# Student's with $\sum_c (n_c - 1)$ degrees of freedom. Two simplifications: one $s$ serves all cells, though those with
# CutMix may scatter more; and runs count as independent, though equal seeds share their initial weights, which leaves
# these intervals too wide if it makes runs alike, and too narrow if it makes them differ.


# %%
def effects(measure: str) -> pd.DataFrame:
    """Main effects and interactions of the 2³ design, with 95 % intervals."""
    change = np.log if measure == "nearest head" else np.asarray  # a minimum: by ratios, as source A has it
    groups = {key: change(of(name, measure)) for key, name in names.items()}
    half = half_interval(pooled_spread(groups.values()), *(len(g) for g in groups.values())) / 4
    rows = {}
    for which in [key for key in product((0, 1), repeat=3) if any(key)]:
        signs = {key: (-1) ** sum(w and not k for w, k in zip(which, key, strict=True)) for key in groups}
        effect = sum(signs[key] * group.mean() for key, group in groups.items()) / 4
        name = " × ".join(factor for factor, on in zip(factors, which, strict=True) if on)
        rows[name] = {"effect": effect, "low": effect - half, "high": effect + half}
    return pd.DataFrame(rows).T.loc[lambda t: sorted(t.index, key=lambda name: name.count("×"))]


complete = all(len(of(name, "all heads")) for name in cells) and any(len(of(name, "all heads")) > 1 for name in cells)
asked = {
    "nearest head": "ln nearest head",
    "first layer": "first layer",
    "all heads": "all heads",
    "neighbours": "neighbours",
}
asked |= {"accuracy": "accuracy (points)"}
found = {measure: effects(measure) for measure in asked} if complete else {}


# %% tags=["hide-input"]
def forest() -> Figure:
    """A panel a measure: effects with their intervals."""
    figure = new_figure(3.2)
    panels = figure.subplots(1, len(found), sharey=True)
    for axes, (measure, rows) in zip(panels, found.items(), strict=True):
        place = range(len(rows))[::-1]
        width = [rows.effect - rows.low, rows.high - rows.effect]
        axes.errorbar(rows.effect, place, xerr=width, fmt="o", capsize=2)
        axes.axvline(0, color="#6F6F6F", linewidth=1, zorder=0)
        axes.set_title(asked[measure], fontsize=8)
        axes.set_yticks(place, rows.index, fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
    return figure


# %% mystnb={"figure": {"caption": "Main effects and interactions on five measures, with 95 % intervals; where an interval covers the line at 0, no effect is shown. To the left is nearer, except for neighbours and accuracy, where to the right is more.", "name": "fig-cutmix-effects"}, "image": {"alt": "Five panels of effects with error bars: AutoAugment, CutMix, smoothing and their interactions."}} tags=["hide-input"]
forest() if found else missing

# %% tags=["hide-input"]
digits = {measure: 2 if measure == "accuracy" else 3 for measure in found}
written = {
    asked[m]: [f"{row.effect:+.{digits[m]}f} ± {row.high - row.effect:.{digits[m]}f}" for _, row in rows.iterrows()]
    for m, rows in found.items()
}
pd.DataFrame(written, index=found["all heads"].index) if found else missing

# %% [markdown]
# ## The other data sets
#
# Source A finds its pattern on all three sets, and most of it on CIFAR-100. One seed a cell here on the other two, so
# judge a difference by what seeds do to one (the last row of the table of controls, below); and with other classes and
# at another resolution our Tiny-ImageNet is no replica of the source's.

# %% tags=["hide-input"]
home = {"cifar100": "CIFAR-100"}.get(arms["Baseline"].data, f"`{arms['Baseline'].data}`")
sets = {home: ""} | {other: f", {other}" for other in others}
columns = ["accuracy", "first layer", "all heads", "neighbours", "nearest head", "10 % quantile", *looks[4:]]
rows = {(where, name): f"{name}{end}" for where, end in sets.items() for name in ("Baseline", "+CutMix", "Modern")}
rows = {key: results.loc[arm, columns].mean() for key, arm in rows.items() if len(of(arm, "all heads"))}
tidy(pd.DataFrame(rows).T.round({"accuracy": 1}), 3) if rows else missing

# %% [markdown]
# ## When does it appear?
#
# Source A looked at the end of training only. Every run here was measured at its milestones.

# %% mystnb={"figure": {"caption": "Mean distance over all heads while training goes on; lines are means over seeds, bands reach from seed to seed. A uniform head reads 0.418, and the axis does not begin at 0. When do the arms part, and do they still move at the end?", "name": "fig-cutmix-course"}, "image": {"alt": "Mean attention distance over epochs for Baseline, AutoAugment, MixUp, CutMix and Modern."}} tags=["hide-input"]
followed = ("Baseline", "+AutoAugment", "+MixUp", "+CutMix", "Modern")
paths = {arm: [table for (name, _), table in courses.items() if name == arm] for arm in followed}
paths = {arm: tables for arm, tables in paths.items() if tables}
training_curves(paths, "all heads", label="distance / largest") if paths else missing

# %% mystnb={"figure": {"caption": "Test accuracy of the same runs. Does it part from Baseline's before or after the heads do, and in the same direction?", "name": "fig-cutmix-accuracy"}, "image": {"alt": "Test accuracy over epochs for Baseline, AutoAugment, MixUp, CutMix and Modern."}} tags=["hide-input"]
training_curves(paths, "accuracy", label="test accuracy (%)") if paths else missing

# %% mystnb={"figure": {"caption": "Modern, layer by layer: which layer moves first, and how far do the others follow?", "name": "fig-cutmix-layers"}, "image": {"alt": "Mean attention distance of each layer of the Modern model over epochs."}} tags=["hide-input"]
whole = [records[run] for (name, _), run in done.items() if name == "Modern"]
stops = [row["epoch"] for row in whole[0].measures] if whole else []
layered = {epoch: [record.heads(epoch, "max") for record in whole] for epoch in stops}
over_epochs(layered, uniform=uniform, label="distance / largest") if whole else missing


# %% [markdown]
# Two questions with a date. When do the heads of an arm leave uniform, and in which layer first? And when does an arm
# *part from Baseline*, in its heads and in its accuracy? We say that it has parted from the first milestone on after
# which the difference of the means over seeds always stays on one side of zero by more than two of its standard errors
# (with the spread over seeds at that milestone, pooled over the arms). If locality bought accuracy, heads should part
# before accuracy *rises*. Mind two things: an arm can part downwards, and a measure that scatters less parts sooner, so a
# few epochs between two columns prove nothing. The last two rows are the long runs, whose partner is the long Baseline;
# only there does accuracy rise.

# %% tags=["hide-input"]
dated = [*(name for name in ordered if name != "Baseline"), "+MixUp"]
longer = [f"{name}, long" for name in ("Baseline", "+CutMix") if f"{name}, long" in arms]


def abreast(base: str) -> dict[tuple[str, int], pd.DataFrame]:
    """The courses that are as long as a base's, by arm and seed."""
    group = longer if base in longer else ("Baseline", *dated)
    return {key: table.set_index("epoch") for key, table in courses.items() if key[0] in group}


def parting(arm: str, base: str, measure: str, sides: tuple[str, str]) -> tuple[float, str | float]:
    """The first milestone from which on an arm is below or above another by two standard errors, and where it is."""
    table = pd.DataFrame({key: course[measure] for key, course in abreast(base).items()}).T
    by_arm = table.rename_axis(["arm", "seed"]).groupby("arm")
    n, means = by_arm.size(), by_arm.mean()
    if not {arm, base} <= set(n.index) or n.max() < 2:
        return np.nan, np.nan
    s = np.sqrt(((table - by_arm.transform("mean")) ** 2).sum() / (n - 1).sum())
    gap = means.loc[arm] - means.loc[base]
    side = np.sign(gap).where(gap.abs() > 2 * s * sqrt(1 / n[arm] + 1 / n[base]), 0)
    stays = ((side == side.iloc[-1]) & (side != 0))[::-1].cummin()
    return stays[stays].index.min(), sides[int(side.iloc[-1] > 0)] if side.iloc[-1] else np.nan


# %% tags=["hide-input"]
def onset(table: pd.DataFrame) -> dict[str, float]:
    """The first milestone at which the mean over heads is below 98 % of uniform, and the nearest layer then."""
    below = table[table["all heads"] < 0.98 * uniform]
    first = below.iloc[0] if len(below) else dict.fromkeys(("epoch", "nearest layer"), np.nan)
    return {"below 98 % of uniform": first["epoch"], "nearest layer then": first["nearest layer"]}


dates = {}
for arm in ("Baseline", *dated, *longer):
    if (arm, 0) in courses:
        base = "Baseline, long" if arm in longer else "Baseline"
        parted = []
        for measure, sides in (("all heads", ("nearer", "farther")), ("accuracy", ("lower", "higher"))):
            parted += parting(arm, base, measure, sides)
        dates[arm] = onset(courses[arm, 0]) | dict(
            zip(("heads part", "and are", "accuracy parts", "and is"), parted, strict=True)
        )
dates = pd.DataFrame(dates).T
epochs = ("below 98 % of uniform", "nearest layer then", "heads part", "accuracy parts")
tidy(dates.astype(dict.fromkeys(epochs, "Int64"))) if len(dates) else missing

# %% [markdown]
# Epochs of milestones, so upper bounds; the first two columns of seed 0. A dash: not within this training.
#
# ## Which part of CutMix does it?
#
# Now the controls. Distances over all heads and weight on the neighbours, as differences from the arm in the column
# *against*, within a seed, in the mean over $n$ pairs. The last row: 95 % of single pairs that differ in nothing but the
# seed lie within ±; divide by $\sqrt n$ for $n$ pairs. Of so many differences a few exceed it by chance. Without self, uniform reads 0.424 instead of 0.418, so those arms have each other for partners,
# and Baseline only for what the mask itself does.


# %% tags=["hide-input"]
def against(arm: str, reference: str = "Baseline") -> dict[str, float]:
    """Differences of an arm from a reference, over the seeds that both have."""
    row = {"n": len((of(arm, "all heads") - of(reference, "all heads")).dropna())}
    for measure in ("all heads", "neighbours", "first layer", "nearest head", "accuracy", "clean loss"):
        row[measure] = (of(arm, measure) - of(reference, measure)).dropna().mean()
    return row


partner = {name: "Baseline" for name in controls} | {"+CutMix": "Baseline", "Modern": "Baseline"}
partner |= {"+CutMix, no self": "Baseline, no self", "+CutMix, half the rate": "Baseline, half the rate"}
partner |= {"+CutMix, mean pool": "Baseline, mean pool"}
partner |= {name: "Baseline" for name in arms if name.endswith("images")}
differences = pd.DataFrame({arm: against(arm, base) for arm, base in partner.items()}).T
differences.insert(0, "against", pd.Series(partner))
measures = ("all heads", "neighbours", "first layer", "nearest head", "accuracy", "clean loss")
replicated = {m: [of(arm, m) for arm in (*cells, *controls) if len(of(arm, m)) > 1] for m in measures}
scatter = {m: half_interval(pooled_spread(groups), 1, 1) for m, groups in replicated.items() if groups}
differences.loc["one pair, by chance: within ±"] = pd.Series(scatter)
tidy(differences.infer_objects().astype({"n": "Int64"}).round({"accuracy": 1, "clean loss": 2}), 3)


# %% tags=["hide-input"]
def dots(measure: str, axes) -> None:
    """A row an arm, a dot a run, and a bar over what Baseline's seeds span; in parts of an even gaze."""
    abroad = [arm for arm in arms if arm.endswith(others)]
    listed = [arm for arm in (*cells, *partner) if arm not in abroad and len(of(arm, measure))]
    listed = list(dict.fromkeys(listed))[::-1]
    for place, arm in enumerate(listed):
        model = arms[arm].model
        keys = T - ("no self" in arm) - (not model.cls_token)
        far = uniform * N / (N - 1) if "no self" in arm else uniform
        values = of(arm, measure) / {"all heads": far, "neighbours": touching / keys}[measure]
        if arm == "Baseline":
            axes.axvspan(values.min(), values.max(), color="#E69F00", alpha=0.3, linewidth=0, zorder=0)
        colour = "#D55E00" if arms[arm].recipe.augment.cutmix else "#0072B2"
        axes.scatter(values, [place] * len(values), s=16, color=colour)
    axes.set_yticks(range(len(listed)), listed, fontsize=7)
    axes.set_xlabel({"all heads": "distance / uniform", "neighbours": "weight on neighbours / uniform"}[measure])


# %% mystnb={"figure": {"caption": "Cells and controls on the chapter's own data: means over all heads in parts of what a model reads that looks everywhere alike (where it may look). A dot a run, vermilion where CutMix or a piece of it is in the recipe; the band spans Baseline's seeds. Which controls leave the band, on both measures, and how far do they go compared with +CutMix?", "name": "fig-cutmix-controls"}, "image": {"alt": "Dot plots of mean attention distance and of the weight on neighbours, one row for each arm."}} tags=["hide-input"]
figure = new_figure(4.4)
left, right = figure.subplots(1, 2, sharey=True)
dots("all heads", left)
dots("neighbours", right)
figure if done else missing

# %% [markdown]
# What each part is worth: differences of means over all seeds, with 95 % intervals from the spread pooled over all
# replicated arms. In the first column, what the comparison isolates.

# %% tags=["hide-input"]
isolated = {
    "a partial view": ("Cutout", "Baseline"),
    "a partial view, a stranger's pixels": ("major label", "Baseline"),
    "a mixed label": ("label only", "Baseline"),
    "a mixed label and mixed pixels, no cut": ("+MixUp", "Baseline"),
    "patches out of place": ("shuffled box", "Baseline"),
    "all of CutMix": ("+CutMix", "Baseline"),
    "the mixed label, added to the cut": ("+CutMix", "major label"),
    "the cut, added to the mixed label": ("+CutMix", "label only"),
    "the cut in place of a blend": ("+CutMix", "+MixUp"),
}  # fmt: skip
of_cutmix = list(isolated)
isolated |= {
    "four times the images": ("Baseline, twice the images", "Baseline, half the images"),
    "twice the epochs, Baseline": ("Baseline, long", "Baseline, short"),
    "twice the epochs, +CutMix": ("+CutMix, long", "+CutMix, short"),
}  # fmt: skip


# %% tags=["hide-input"]
def worth(arm: str, base: str, measure: str) -> dict[str, str]:
    """The difference of two arms' means with its 95 % interval, and whether heads come nearer: by less distance, or
    by more weight on neighbours."""
    one, other = of(arm, measure), of(base, measure)
    gap, half = one.mean() - other.mean(), half_interval(pooled_spread(replicated[measure]), len(one), len(other))
    inward = gap if measure == "neighbours" else -gap
    comes = "nearer" if inward > half else "farther" if inward < -half else "cannot tell"
    return {"difference": f"{gap:+.3f} ± {half:.3f}", "comes": comes}


def compared_arms(arm: str, base: str) -> str:
    """A difference of two arms by name; what two variants of one arm share is said once."""
    (one, _, this), (other, _, that) = arm.partition(", "), base.partition(", ")
    return f"{one}: {this} − {that}" if one == other and this and that else f"{arm} − {base}"


columns = ["all heads", "first layer", "neighbours", "clean loss"]
pieces = {name: pair for name, pair in isolated.items() if scatter and all(len(of(arm, "all heads")) for arm in pair)}
parts = pd.DataFrame({(name, m): worth(*pair, m) for name, pair in pieces.items() for m in columns}).T
if len(parts):
    table = parts["difference"].unstack().reindex(index=list(pieces), columns=columns)
    table.insert(0, "arms", [compared_arms(*pair) for pair in pieces.values()])
table if len(parts) else missing

# %% [markdown]
# Where a whole interval lies on the near side of 0, what the row names is enough for part of the effect. Mind its width:
# of an arm with one run it is as wide as the whole effect of CutMix on all heads, so that a part which did everything
# would still leave it open. And *major label* is not free of label noise, for its picture shows something that its label
# leaves out. The rows on epochs say whether heads still move when training goes on.

# %% [markdown]
# ## The rival: pressure that lasts
#
# There is another explanation, and it needs no cut. Heads move while the loss pushes. Trained long enough, Baseline
# learns its images by heart; then its loss is nearly zero, and nothing pushes any more. An arm whose images or labels are mixed cannot learn
# them by heart, so the pressure lasts as long as training does. On this account CutMix makes heads local by keeping
# the model busy, and anything that keeps it as busy would do.
#
# How busy a model still is can be read from every record: the loss on the same 2,000 clean training images, with hard
# labels, whatever the arm was trained on. Three tests follow from it.
#
# 1. **Paths.** At one clean loss, an arm that cannot memorise has been pushed for more steps. The rival expects it to be
#    the nearer one; so would an effect of the cut. This comparison can speak *against* the rival (if a busy arm is no
#    nearer), not for either.
# 2. **Ends.** After equally many steps the rival has one prediction: who remembers less is nearer, whatever kept it from
#    remembering. All ends then lie along one line: the larger the loss that is left, the smaller the distance; and arms that
#    are equally busy end equally near.
# 3. **More images, same recipe.** Baseline on half and on twice the images takes as many steps and differs in nothing but
#    how much there is to learn by heart. The rival expects it to be more local on more images.

# %% mystnb={"figure": {"caption": "Mean distance against the loss on clean training images. Left: means over seeds at every milestone, time running from left to right, as the loss falls. Right: where training ends, after equally many steps, a mark a run; crosses are arms with cut pixels, triangles Baseline on half (pointing down) and on twice (pointing up) the images. Do the ends lie on one line, which would rise to the right, where losses are small?", "name": "fig-cutmix-loss"}, "image": {"alt": "Paths of mean attention distance over clean training loss for several arms, and a scatter of their ends."}} tags=["hide-input"]
compared = ("Baseline", "+AutoAugment", "+MixUp", "label only", "Cutout", "major label", "+CutMix", "Modern")
cut_pixels = ("Cutout", "major label", "+CutMix", "Modern")
averaged = {
    arm: pd.concat(tables).groupby("epoch", as_index=False).mean()
    for arm in compared
    if (tables := [table for (name, _), table in courses.items() if name == arm])
}
figure = new_figure(3.4)
left, right = figure.subplots(1, 2, sharey=True)
for arm, path in averaged.items():
    ink = {"color": "#1A1A1A"} if arm == "Baseline" else {}
    (line,) = left.plot(path["clean loss"], path["all heads"], marker=".", markersize=4, label=arm, **ink)
    dot = {"color": line.get_color(), "marker": "x" if arm in cut_pixels else "o"}
    right.scatter(of(arm, "clean loss"), of(arm, "all heads"), s=22, **dot)
for arm, mark in (("Baseline, half the images", "v"), ("Baseline, twice the images", "^")):
    right.scatter(of(arm, "clean loss"), of(arm, "all heads"), s=28, marker=mark, color="#6F6F6F")
for axes, when in ((left, "on the way"), (right, "at the end")):
    axes.set(xlabel="loss on clean training images (nats)", title=when)
    axes.invert_xaxis()
left.set_ylabel("distance / largest, all heads")
if averaged:
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
figure if averaged else missing


# %% tags=["hide-input"]
def at_loss(table: pd.DataFrame, level: float, measure: str) -> float:
    """A measure where the clean loss first reaches a level, between two milestones by a straight line."""
    before = table["clean loss"].cummin()
    if before.min() > level:
        return np.nan
    stop = int((before <= level).idxmax())
    if stop == 0:
        return table[measure][0]
    (a, b), (u, v) = table["clean loss"][stop - 1 : stop + 1], table[measure][stop - 1 : stop + 1]
    return float(u + (v - u) * (a - level) / (a - b))


equal, first = {}, averaged.get("Baseline")
for arm, path in averaged.items():
    if arm != "Baseline" and first is not None:
        end = path["clean loss"].iloc[-1]
        then = {m: at_loss(first, end, m) for m in ("epoch", "all heads", "neighbours", "first layer")}
        equal[arm] = {"clean loss": end, "Baseline's epoch": then.pop("epoch")}
        equal[arm] |= {m: path[m].iloc[-1] - value for m, value in then.items()}
tidy(pd.DataFrame(equal).T, 3) if equal else missing

# %% [markdown]
# Test 1 in numbers: an arm at its end, less Baseline in the epoch in which it had the same clean loss (means over seeds,
# Baseline between milestones by a straight line). Mind that epoch: the earlier it is, the fewer steps Baseline had taken,
# at a higher rate.


# %% tags=["hide-input"]
def stretch(arm: str, start: int = 20) -> str:
    """From epoch 20 to the end: the clean loss, and the mean distance of all heads."""
    path = averaged[arm].set_index("epoch")[["clean loss", "all heads"]]
    (loss, far), (last, near) = path.loc[start], path.iloc[-1]
    return f"{arm}'s clean loss goes from {loss:.2f} to {last:.2f} and the distance from {far:.3f} to {near:.3f}"


paths_told = [stretch(arm) for arm in ("Baseline", "+CutMix") if arm in averaged and scatter]
Markdown(f"From epoch 20 to the end {'; '.join(paths_told)}." if paths_told else "")

# %% [markdown]
# The rival needs heads to move as long as there is loss to take away. Do Baseline's, in that stretch?
#
# ## Three accounts, and what speaks for them
#
# What each account expects of pairs of arms, and whether they bear it out, by three measures. A difference speaks *for*
# or *against* when its 95 % interval leaves 0 out. The busy arms serve twice: what makes them busy is an account of its
# own, and that they are busy is the rival's. Test 1 is not among these, for it has no interval. None of this was
# registered: the pairs were chosen when Cutout and major label had been seen, and only the cells are judged below.

# %%
usual = {"nearer": "for", "farther": "against", "cannot tell": "cannot tell"}
tests = [
    ("partial view", "Cutout is nearer than Baseline", "a partial view", usual),
    ("partial view", "major label is nearer than Baseline", "a partial view, a stranger's pixels", usual),
    ("partial view", "+CutMix is nearer than label only", "the cut, added to the mixed label", usual),
    ("partial view", "+CutMix is nearer than +MixUp", "the cut in place of a blend", usual),
    ("mixed label", "label only is nearer than Baseline", "a mixed label", usual),
    ("mixed label", "+MixUp is nearer than Baseline", "a mixed label and mixed pixels, no cut", usual),
    ("mixed label", "+CutMix is nearer than major label", "the mixed label, added to the cut", usual),
    ("lasting pressure", "Cutout, busier, is nearer than Baseline", "a partial view", usual),
    ("lasting pressure", "major label, busier, is nearer", "a partial view, a stranger's pixels", usual),
    ("lasting pressure", "+MixUp, busier, is nearer", "a mixed label and mixed pixels, no cut", usual),
    ("lasting pressure", "+CutMix, as busy as major label, is as near", "the mixed label, added to the cut",
     usual | {"nearer": "against"}),
    ("lasting pressure", "Baseline is nearer on more images (test 3)", "four times the images", usual),
]  # fmt: skip
near_by = ["all heads", "first layer", "neighbours"]
accounts = {
    (account, expects): parts["comes"][name][near_by].map(says)
    for account, expects, name, says in tests
    if name in pieces
}
accounts = pd.DataFrame(accounts).T
accounts if len(accounts) else missing

# %% [markdown]
# What we take from this, at `desk`. **A mixed label is what the cut lacks.** With CutMix's own pixels and the label of the
# larger part alone, heads do not come near; they go out. Add the mixed label to the same pixels, and they come near by
# all three measures, though the clean loss left at the end is the same. A mixed label over a blend of two images (+MixUp) was not shown to
# do it, so the label does not do it alone either: +CutMix is ahead of +MixUp in the first layer and on neighbours. **A
# partial view by itself is not it**: Cutout moves nothing that we could tell, in either direction.
#
# **The rival in its plain form fails**, that whatever keeps a model busy brings heads near: *major label* is as busy as
# +CutMix. But it cannot be sent home. Where there is least to learn it is right: on half of the images, with nothing
# mixed and nothing cut, Baseline puts less weight on neighbours, by as much as CutMix adds; on twice as many it puts no
# more. And from 50 epochs to 100, its loss cut by half, Baseline's heads stand still where +CutMix's go on. Pressure may
# have to come from something that can be *learned*, and a picture that contradicts its label is not that. What these
# arms cannot separate: more images are more varied ones as well as a loss that lasts, and +CutMix keeps its loss up *by*
# mixing labels. Cutout, *major label* and both numbers of images are one run each.
#
# ## Two heads to remember
#
# The nearest head of Baseline and that of Modern, on the same images, from the same query.

# %% tags=["hide-input"]
two = {name: records[done[name, 0]] for name in ("Baseline", "Modern") if (name, 0) in done}
images = load_or_shapes(arms["Baseline"].data, "test", limit=6)
x = images.normalise(images.images)
attns = {}
for name, record in two.items():
    with torch.no_grad():
        kept = record.model()(x, capture=True)[1]
    attns[name] = torch.stack([kept[f"block{i}.attn"] for i in range(config.depth)], 1)  # [n, L, H, T, T]


def portrait() -> Figure:
    """A row a model: its nearest head from the patch in row 3, column 3."""
    figure = new_figure(3.4)
    panels = figure.subplots(1 + len(two), 6, squeeze=False)
    for axes, image in zip(panels[0], images.images, strict=True):
        axes.imshow(image.permute(1, 2, 0))
    for row, name in zip(panels[1:], two, strict=True):
        layer, head = (int(of(name, part)[0]) for part in ("its layer", "its head"))
        for axes, attn in zip(row, attns[name], strict=True):
            axes.imshow(attn[layer, head, 1 + 3 * grid[1] + 3, 1:].view(grid), vmin=0)
            axes.plot(3, 3, marker="s", ms=5, mfc="none", mec="white")
        row[0].set_ylabel(f"{name}\nlayer {layer}, head {head}", fontsize=7)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    return figure


# %% mystnb={"figure": {"caption": "Six test images, and where the nearest head of Baseline and that of Modern (seed 0) look from the marked patch; each map is scaled to its own maximum. Does the bright spot stay with the query, whatever the image?", "name": "fig-cutmix-portrait"}, "image": {"alt": "Test images above attention maps of one head of the Baseline model and one of the Modern model."}} tags=["hide-input"]
portrait() if len(two) == 2 else missing

# %% [markdown]
# All heads of both, live. Choose layer and head, and move the query over the image. Heads have no common numbering: head 2
# of one model has nothing to do with head 2 of the other.

# %% tags=["hide-input"]
from vitbook.show import Explorer

pixels = images.images.permute(0, 2, 3, 1).numpy()
labels = [images.classes[i] for i in images.labels]
maps = {name: attn.numpy() for name, attn in attns.items()}
Explorer.of(pixels, maps, grid, labels=labels, layer=0, head=0) if len(two) == 2 else missing

# %% [markdown]
# ## What became of the claims
#
# Each claim of source A on a minimum stands beside companions on means, registered with it. A pair is compared within a
# seed, and the interval is Student's over seeds. Two or three seeds say little of their own spread, so one with more
# degrees of freedom stands in, pooled for each measure, as if all scattered alike in parts of their value: for claims on pairs, and on the gap
# between groups, that of the four pairs with and without CutMix, which share no run; for claims that something has no
# effect, that of the four cells without CutMix. Claims on Modern alone use its own three seeds. All this was settled
# when none of these runs had been looked at, but not in ignorance: pilots of the same models, at the same scale and with
# some of the same seeds, had shown minima and means over heads of Baseline, +MixUp and +CutMix. So *holds* means that
# they repeat, not that they were foreseen.

# %%
from pathlib import Path

from vitbook.show import claim_cards, judge, load_claims

on, off = [n for key, n in names.items() if key[1]], [n for key, n in names.items() if not key[1]]
kinds = {"min": "nearest head", "mean": "all heads", "neighbours": "neighbours", "first": "first layer"}
pairs = {"alone": ("+CutMix", "Baseline"), "aa": ("−Label Smoothing", "+AutoAugment")}
pairs |= {"ls": ("−AutoAugment", "+Label Smoothing"), "aals": ("Modern", "−CutMix")}
inert = {"aa": "+AutoAugment", "ls": "+Label Smoothing", "aals": "−CutMix", "mixup": "+MixUp"}


def ratio(measure: str, arm: str, base: str) -> pd.Series:
    return (of(arm, measure) / of(base, measure)).dropna()


def apart(kind: str) -> pd.Series:
    """The extreme cell with CutMix over the extreme cell without; one value a seed that all cells have."""
    table = results[kinds[kind]].unstack("seed").reindex(list(cells)).dropna(axis=1)
    high = kind == "neighbours"
    return table.loc[on].min() / table.loc[off].max() if high else table.loc[on].max() / table.loc[off].min()


# %%
def lent(groups) -> tuple[float, int] | None:
    """The spread of a contrast over seeds, pooled over the four pairs."""
    groups = list(groups)
    return pooled_spread(groups) if any(len(group) > 1 for group in groups) else None


def points(arm: str, base: str) -> pd.Series:
    return (of(arm, "accuracy") - of(base, "accuracy")).dropna()


def calm(measure: str) -> tuple[float, int] | None:
    """The spread of a ratio of two runs without CutMix, pooled over the four cells."""
    found = lent(of(name, measure) / of(name, measure).mean() for name in off)
    return found and (sqrt(2) * found[0], found[1])


def at(values: pd.Series, spread: tuple[float, int] | None) -> tuple[float, int] | None:
    """A ratio scatters in proportion to itself: a relative spread, at the size of these values."""
    return spread and (spread[0] * values.mean(), spread[1])


spreads = {m: lent(np.log(ratio(m, *pair)) for pair in pairs.values()) for m in kinds.values()}
spreads["accuracy"] = lent(points(*pair) for pair in pairs.values())

# %%
tested = {}  # name: values a seed, arms, spread to lend
for kind, m in kinds.items():
    for key, pair in pairs.items():
        values = ratio(m, *pair)
        tested[f"{kind}-{key}"] = values, pair, at(values, spreads[m])
    values = apart(kind)
    tested[f"disjoint-{kind}"] = values, list(cells), at(values, spreads[m])
    for key, arm in inert.items():
        values = ratio(m, arm, "Baseline")
        tested[f"{key}-leaves-{kind}"] = values, (arm, "Baseline"), at(values, calm(m))
    if kind in ("mean", "neighbours"):
        values = ratio(m, "+CutMix", "+MixUp")
        tested[f"over-mixup-{kind}"] = values, ("+CutMix", "+MixUp"), at(values, spreads[m])

# %%
for key, arm in {"aa": "+AutoAugment", "cutmix": "+CutMix"}.items():
    tested[f"{key}-accuracy"] = points(arm, "Baseline"), (arm, "Baseline"), spreads["accuracy"]
modern = {
    "modern-first": of("Modern", "first layer") / uniform,
    "modern-last": of("Modern", "last layer") / uniform,
    "nearest-on-neighbours": of("Modern", "its neighbours") / (touching / T),
    "nearest-over-self": of("Modern", "its neighbours") - of("Modern", "its self"),
    "nearest-over-cls": of("Modern", "its neighbours") - of("Modern", "its CLS"),
}
tested |= {name: (values, ("Modern",), None) for name, values in modern.items()}

claims = load_claims(Path("../book/claims.yml"))
verdicts = []
for name, (values, used, spread) in tested.items():
    if len(values):
        behind = [runs[arm, seed].id for arm in used for seed in values.index]
        how = {"profile": scale.name, "records": behind, "pooled_sd": spread}
        verdicts.append(judge(claims[f"cutmix.{name}"], values, **how))
if len(verdicts) < len(tested):
    print(f"{len(tested) - len(verdicts)} of {len(tested)} claims wait for their recordings.")

# %% [markdown]
# The claims on pairs at a glance, as ratios, with their verdicts; beside them what is not judged: the 10 % quantile, and the
# same pair at 100 epochs. Below, folded, all claims one by one.

# %% tags=["hide-input"]
from vitbook.show.cards import SYMBOLS

verdict_of = {v.claim.removeprefix("cutmix."): v for v in verdicts}
listed = {f"{arm} / {base}": (f"{{}}-{key}", arm, base) for key, (arm, base) in pairs.items()}
listed |= {f"no change? {arm} / Baseline": (f"{key}-leaves-{{}}", arm, "Baseline") for key, arm in inert.items()}
glance = {}
for title, (form, arm, base) in listed.items():
    row = {kinds[kind]: verdict_of.get(form.format(kind)) for kind in ("min", "first", "mean", "neighbours")}
    row = {m: f"{v.value:.2f} {SYMBOLS[v.verdict]}" if v else "–" for m, v in row.items()}
    glance[title] = row | {"10 % quantile": f"{ratio('10 % quantile', arm, base).mean():.2f}"}
for epochs, word in list(lengths.items())[1:]:
    pair = [f"{name}, {word}" for name in ("+CutMix", "Baseline")]
    row = {m: f"{ratio(m, *pair).mean():.2f}" for m in (*kinds.values(), "10 % quantile")}
    glance[f"{epochs} epochs: +CutMix / Baseline"] = row
pd.DataFrame(glance).T.replace("nan", "–") if verdicts else missing

# %% tags=["hide-input", "hide-output"]
claim_cards(claims, verdicts) if verdicts else missing


# %% tags=["hide-input"]
def held(kind: str) -> str:
    """In how many of the four pairs a claim holds, and in how many it cannot be told."""
    found_to = [verdict_of[f"{kind}-{key}"].verdict for key in pairs]
    open_ones = len(found_to) - found_to.count("holds") - found_to.count("does not hold")
    return f"{found_to.count('holds')} of 4" + (f" ({open_ones} cannot be told)" if open_ones else "")


def main_effect(measure: str) -> str:
    """What CutMix does to a measure over the eight recipes, with its interval."""
    effect, low, high = found[measure].loc["CutMix", ["effect", "low", "high"]]
    return f"{effect:+.3f} ({low:+.3f} to {high:+.3f})"


def with_and_without(measure: str) -> str:
    """What CutMix does to a measure in the cells without AutoAugment, and in those with it."""
    groups, said = {key: of(name, measure) for key, name in names.items()}, []
    for policy in (0, 1):
        four = {key: group for key, group in groups.items() if key[0] == policy}
        gap = sum((1 if key[1] else -1) * group.mean() for key, group in four.items()) / 2
        half = half_interval(pooled_spread(groups.values()), *(len(group) for group in four.values())) / 2
        said.append(f"{gap:+.3f} ± {half:.3f}")
    return "without AutoAugment {}, with it {}".format(*said)


# %% tags=["hide-input"]
def nearer() -> str:
    """Whether CutMix makes heads local: pair by pair, and over the whole design."""
    return (
        f"**Nearer?** Pair by pair, CutMix brings all heads nearer on average in {held('mean')}, puts more weight on "
        f"neighbours in {held('neighbours')}, brings the first layer nearer in {held('first')}; the nearest head falls to "
        f"less than half, as in source A, in {held('min')}. Over all eight recipes, with 95 % intervals, it moves the "
        f"distance of the first layer (uniform is {uniform:.3f}) by {main_effect('first layer')}. On the mean over all "
        f"heads AutoAugment matters: {with_and_without('all heads')}; on the weight on neighbours, "
        f"{with_and_without('neighbours')}."
    )


# %% tags=["hide-input"]
def which_kind() -> str:
    """What the nearest head of Modern looks at."""
    near = {name: of(name, "nearest head").mean() for name in ("Baseline", "Modern")}
    mass = {name: of("Modern", f"its {name}").mean() for name in ("neighbours", "self", "CLS")}
    return (
        f"**Which kind of near?** Modern's nearest head ({near['Modern']:.3f}; Baseline's {near['Baseline']:.3f}) gives "
        f"{mass['neighbours']:.2f} of its weight to the neighbours (an even gaze {touching / T:.2f}), {mass['self']:.2f} "
        f"to its own patch, {mass['CLS']:.2f} to CLS and the rest to what is farther off."
    )


# %% tags=["hide-input"]
def because() -> str:
    """Which parts of CutMix bring heads nearer, and for which account that speaks."""
    told = []
    for measure in near_by[:2]:
        rows = parts.xs(measure, level=1).reindex([name for name in of_cutmix if name in pieces])
        shown = "*" + rows.index + "* (" + rows["difference"] + ")"
        which = {word: ", ".join(shown[rows["comes"] == word]) for word in ("nearer", "farther")}
        place = {"first layer": "the first layer"}.get(measure, measure)
        told.append(f"on {place}, " + "; ".join(f"{word} by {those}" for word, those in which.items() if those))
    spoken = []
    for account, rows in accounts.groupby(level=0, sort=False):
        each = (f"{sum(column == 'for')} : {sum(column == 'against')}" for _, column in rows.items())
        spoken.append(f"{account} {', '.join(each)} of {len(rows)}")
    return (
        f"**By which part?** Without the other factors: {'; '.join(told)}; the rest cannot be told. How many "
        f"tests of each account speak for : against it, on all heads, the first layer and neighbours: {'; '.join(spoken)}."
    )


# %% tags=["hide-input"]
def moment(arm: str) -> str:
    """When the heads and the accuracy of an arm part from those of its partner."""
    row = dates.loc[arm]
    heads, right = (
        f"{side} by epoch {int(epoch)}" if epoch == epoch else "never clearly apart"
        for epoch, side in ((row["heads part"], row["and are"]), (row["accuracy parts"], row["and is"]))
    )
    return f"of {arms[arm].recipe.epochs} epochs, heads are {heads} and accuracy is {right}"


def longer_by(measure: str) -> str:
    """How much larger the effect of CutMix is on the long schedule."""
    groups = [of(f"{name}, {word}", measure) for word in lengths.values() for name in ("+CutMix", "Baseline")]
    short, base, long, long_base = (group.mean() for group in groups)
    half = half_interval(pooled_spread(groups), *(len(group) for group in groups))
    return f"{(long - long_base) - (short - base):+.3f} ± {half:.3f}"


# %% tags=["hide-input"]
def when() -> str:
    """When heads and accuracy part from Baseline, and what a longer schedule changes."""
    points = [noise.loc[("accuracy", word), "effect"] for word in lengths.values()]
    whole = of("Modern", "accuracy").mean() - of("Baseline", "accuracy").mean()
    return (
        f"**When?** +CutMix against Baseline: {moment('+CutMix')}; {moment('+CutMix, long')}. Twice the epochs change its "
        f"effect on all heads by {longer_by('all heads')}, on neighbours by {longer_by('neighbours')}, and on accuracy from "
        f"{points[0]:+.1f} to {points[1]:+.1f} points. At {schedule} epochs Modern is {whole:+.1f} points from Baseline: "
        f"this page sees the beginning of what mixing does."
    )


# %% tags=["hide-input"]
def answered() -> str:
    """The lines at the top of the page, made from the records."""
    what = f"On {home}, in a ViT of {config.depth} layers × {config.dim}:"
    return "\n".join([what, "", *(f"- {line}" for line in (nearer(), which_kind(), because(), when()))])


def tally(of_source: bool) -> str:
    """Verdicts counted, of the source's own statements or of ours."""
    ours = ("our ", "prediction ")  # how the place begins of what the source does not say itself
    mine = [v.verdict for v in verdicts if claims[v.claim].where.startswith(ours) != of_source]
    return ", ".join(f"{mine.count(kind)} *{kind}*" for kind in sorted(set(mine)))


# %% tags=["hide-input"]
ready = found and len(parts) and scale.name == "desk"
there, wanted = (len(set(group.values())) for group in (done, runs))
waiting = f"**The recordings are still being made: {there} of {wanted} runs are there.**"
if scale.name != "desk":
    waiting = f"**At the scale of {scale.name} this page concludes nothing.**"
counted = f"\n\nClaims of source A's: {tally(True)}. Companions and predictions of ours: {tally(False)}."
answer.update(Markdown((answered() if ready else waiting) + (counted if verdicts else "")))

# %% [markdown]
# ## Limits
#
# One architecture, far smaller than source A's, half of the images, and a fraction of the epochs that we would give it.
# How the effect changes from 50 epochs to 100 stands under *First the noise*; what two hundred would do is not known. And
# a minimum over 24 heads is not a minimum over 64. Forty-five claims are judged at 95 % each, many of them on the same runs: a few
# will go astray by chance. Of the sixteen that something changes nothing, all but the four on neighbours have margins
# narrower than our intervals: with two or three seeds they could not have held, and *cannot tell* says little of them.
#
# Three rules are at work, and they can differ on one pair. Claims compare within a seed, the parts compare means over
# seeds, and dates go by two standard errors; that pairing narrows an interval is not given, and here it widens it.
#
# The controls separate *parts of CutMix*, not mechanisms in the network. An arm that moves heads as much as CutMix
# shows that what it keeps of CutMix is enough; an arm that does not shows that it is not enough by itself, which is
# weaker than "plays no part". Equal clean loss is one way to say "equally memorised", and not a pure one: an arm trained on
# mixed images meets a clean image as a novelty, and one trained on mixed or smoothed labels is taught to be unsure; both
# may read as less trained than they are.
#
# What we could not learn, having only the abstract and a digest of source A: optimiser, learning rate, batch, epochs, whether it has a CLS token, how often CutMix is
# applied, the unit of its distance, whether its minimum runs over all layers, and which images were measured.
#
# ## Exercise
#
# *Is it the view or the label?* On 5,000 images for 20 epochs, train +CutMix and *label only*, from the same seed: the
# same labels, with and without the pixels. **Predict first:** which one ends nearer? Which one has the lower loss on
# clean training images, and does that already answer the question? Then set `try_it = True`: two small models side by
# side, some five minutes on two cores. The check asks whether the arms differ in the pixels alone. And the harder
# question: design the arm that has CutMix's pixels and *wrong* labels of the same shares. What should it show if labels
# were all that matters?

# %%
try_it = False
if try_it:
    brief = {"limit": 5_000, "recipe.epochs": 20, "recipe.warmup": 2}
    trial = {name: changed(desk.scale((cells | controls)[name]), brief) for name in ("+CutMix", "label only")}
    trained = obtain_many(trial.values())
    ends = {name: quantities(trained[run]) | {"accuracy": 100 * trained[run].accuracy} for name, run in trial.items()}
    display(pd.DataFrame(ends).T[["accuracy", "all heads", "neighbours", "first layer", "nearest head"]].round(3))
    # The check.
    first, second = (trained[run] for run in trial.values())
    assert first.heads(0).equals(second.heads(0)), "both arms start from the same weights"
    batch = torch.rand(8, 3, 32, 32), torch.arange(8)
    torch.manual_seed(0)
    pasted, shares = trial["+CutMix"].recipe.augment.mix(*batch, 100)
    torch.manual_seed(0)
    whole_images, same = trial["label only"].recipe.augment.mix(*batch, 100)
    assert torch.equal(shares, same) and torch.equal(whole_images, batch[0]), "same labels, untouched pixels"
    print("Sound.")

# %% [markdown]
# ## References
#
# The claims: {cite:t}`santiago2026cutmix`. The three factors: {cite:t}`cubuk2019autoaugment`, {cite:t}`yun2019cutmix`,
# {cite:t}`szegedy2016inception`. The controls: {cite:t}`zhang2018mixup`, {cite:t}`devries2017cutout`; attention without
# self from {cite:t}`lee2021small`. Heads of large models that do become local: {cite:t}`raghu2021see`.

# %% tags=["remove-input"]
from vitbook.show import provenance_line

provenance_line([record.provenance for record in records.values()], scale.name)
