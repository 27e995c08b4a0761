# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is position enough? Attention that never looks at the image, and images in pieces

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
# | **question** | How far does attention get that reads positions alone, and what is lost when an image is cut up and shuffled? |
# | **claims under test** | source D {cite:p}`jelassi2022spatial`: such attention is competitive; a ViT does not mind a shuffled grid, a CNN does; position embeddings learn who the neighbours are |
# | **its numbers** | ImageNet, 68.9 % against 71.9 % (Figure 6); curves and pictures without numbers (Figures 1, 5, 7, 8) |
# | **what is run** | positional and vanilla attention on two sets; images cut up and shuffled: a CNN at five sizes of the pieces, a ViT at three |
# | **to take home** | half of these results are findings, and the other half are symmetries that no training run could have missed |
#
# Chapter 07 showed gradient descent finding the neighbours in a toy world, with attention that depends on places and on
# nothing else. Here that attention goes into a real ViT and meets real images.

# %% tags=["parameters", "hide-input"]
profile: str = "desk"
train: bool = False  # True: train what is not recorded

# %% tags=["hide-input"]
from copy import deepcopy
from dataclasses import replace
from math import log, sqrt

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from vitbook.data import DataUnavailable, grid_shuffle, load, load_or_shapes
from vitbook.measures.heads import neighbours, patch_distances
from vitbook.measures.positions import neighbour_similarity, position_similarity
from vitbook.models.adapters import TimmConfig
from vitbook.models.vit import ViTConfig
from vitbook.runs import Profile, Recipe, Run, changed, choose, minutes, obtain_many, remember
from vitbook.runs.training import machine
from vitbook.show import distance_entropy_plane, half_interval, house_style, layer_profile, new_figure
from vitbook.show import pooled_spread, tidy, training_curves

house_style()

# %% [markdown]
# ## Attention without looking
#
# In plain attention a patch decides by its *content* whom it asks: queries and keys are made from tokens
# {cite:p}`vaswani2017attention`. In **positional attention** they are made from the position embeddings $P$ alone, and
# only the values are made from tokens $X$:
#
# $$
# A = \operatorname{softmax}\Bigl(\frac{(\hat P W^q)(\hat P W^k)^{\top}}{\sqrt d}\Bigr), \qquad Y = A\,(X W^v),
# $$
#
# for each head of width $d$, where $\hat P$ is $P$ with every row brought to mean 0 and variance 1. No image occurs in
# $A$. Once trained, a head is a fixed table of $T \times T$ weights: who listens to whom is settled before any image
# comes in. That is close to an MLP-Mixer {cite:p}`tolstikhin2021mixer`, with the difference that rows are positive and
# sum to one; and it is enough to express a convolution, given heads enough {cite:p}`cordonnier2020relationship`.
#
# Of source D's layers we know only that logits come from position embeddings and values from patches. **Ours** are the
# choices in between: every layer reads the one table $P$ with its own $W^q$ and $W^k$; $\hat P$ is normalised as tokens
# are; CLS has a row of $P$ like any patch; positions are also added to the tokens, as in a plain ViT. So both kinds have the
# same parameters, by name and number. (On this page $P$ is the table of position embeddings, not the number of tokens in
# front, and $p_j$ its row for patch $j$, not a patch's side; $X$ are the tokens after the layer's norm, and biases are
# left out of the formula.)

# %%
sizes = {}
for attention in ("plain", "positional"):
    net = ViTConfig(attention=attention).build()
    sizes[attention] = {name: p.shape for name, p in net.named_parameters()}
assert sizes["plain"] == sizes["positional"]

# %% [markdown]
# ## The runs
#
# At source D's scale, as far as it is known: 7 layers of 12 heads, width 384, MLPs of the same width, Adam, a cosine
# over 200 epochs, batches of 128 images (its appendix A.1). Its learning rate, warmup, augmentation and weight decay are
# not; 1e-3, ten epochs, crop and mirror, and none are ours. Patches have 4 px; where grids are shuffled, 2 px.

# %%
vanilla = Run(
    "cifar100",
    ViTConfig(dim=384, depth=7, heads=12, mlp_ratio=1),
    Recipe(epochs=200, batch=128, weight_decay=0.0),  # Adam
)
positional = changed(vanilla, {"model.attention": "positional"})
fine = changed(vanilla, {"model.patch": 2})
cnn = replace(vanilla, model=TimmConfig("resnet18", image=32))

# %% [markdown]
# This page is `desk`: the base of this book, on the first 25,000 images of CIFAR-100 {cite:p}`krizhevsky2009cifar`, with
# patches of 4 px throughout; the table lists what that changes of a ViT's run. Its
# vanilla ViT is chapter 04's Baseline, and on CIFAR-10 step 4 of chapter 03, not trained again but the very same
# records. The CNN is a ResNet {cite:p}`he2016resnet` with a quarter of the channels of ResNet-18. Which CNN source D
# used we do not know. Ours has the ViT's recipe, unchanged: with batch norm it should bear that rate, but nobody has
# tuned it for the CNN. (Its first layer keeps 64 channels, and its last works on 1 × 1 places, where nothing is left to
# move.)

# %%
common = {
    "limit": 25_000, "recipe.epochs": 50, "recipe.warmup": 5,
    "recipe.batch": 64, "recipe.lr": 3e-3, "recipe.weight_decay": 0.05,
}  # fmt: skip
small = {"model.patch": 4, "model.dim": 64, "model.depth": 6, "model.heads": 4}
small |= {"model.mlp_ratio": 2}
narrow = {"model.options": {"channels": (16, 32, 64, 128)}}
brief = {
    "data": "shapes", "limit": 128, "model.classes": 10, "recipe.epochs": 2,
    "recipe.warmup": 1, "recipe.batch": 64, "recipe.lr": 3e-3,
}  # fmt: skip
tiny = {"model.patch": 4, "model.dim": 16, "model.depth": 2, "model.heads": 2}
slim = {"model.options": {"channels": (4, 8, 8, 8)}}
paper = Profile("paper", seeds=tuple(range(10)))  # as in Figure 7
desk, smoke = Profile("desk", common | small), Profile("smoke", brief | tiny)
vits = choose(profile, desk, smoke, paper)
changes = {"desk": common | narrow, "smoke": brief | slim, "paper": {}}
cnns = Profile(profile, changes[profile])
vits.differences(vanilla).drop(index="seeds")  # those follow below

# %% [markdown]
# Two sets, then; CIFAR-10 with all its images and fewer epochs, as in chapter 03. Source D has a third, SVHN
# {cite:p}`netzer2011svhn`: house numbers, which must not be mirrored. It is part of `paper`; `svhn = True` in the next
# cell adds it here, wherever it can be downloaded.

# %%
svhn = vits.name == "paper"
sets = {"CIFAR-100": {}, "CIFAR-10": {"data": "cifar10", "model.classes": 10}}
length = {"CIFAR-10": {"limit": None, "recipe.epochs": 30, "recipe.warmup": 3}}
if svhn:
    try:
        load("svhn", "test", limit=1)
        sets["SVHN"] = {"data": "svhn", "model.classes": 10}
        sets["SVHN"] |= {"recipe.augment.flip": False}
        length["SVHN"] = length["CIFAR-10"] | {"recipe.epochs": 20}
    except DataUnavailable as error:
        print(f"Without SVHN. {error}")


def on(name: str, run: Run) -> Run:
    """A ViT's run on one of the sets, at this page's scale."""
    scaled = vits.scale(changed(run, sets[name]))
    at_desk = vits.name == "desk"
    return changed(scaled, length.get(name, {})) if at_desk else scaled


# %% [markdown]
# A shuffle cuts every image into square cells and lets them change places, by one permutation for all images. It is named
# by the side of its cells in pixels; 0 leaves images whole. In the order in which they are made: what the claims need,
# then second seeds. Source D's patches of 2 px are left to `paper`: with cells of whole patches such a run is an
# unshuffled one, as will be shown, and on a CPU each would cost several others. *No crop* is a vanilla run whose images
# were not shifted at random; what it is for comes with the position embeddings.

# %%
cells = (1, 2, 4, 8, 16)
whole_vit, whole_cnn = vits.scale(fine), cnns.scale(cnn)
arms = {("vanilla", name): on(name, vanilla) for name in sets}
arms |= {("positional", name): on(name, positional) for name in sets}
arms |= {("ViT", n): replace(whole_vit, shuffle=n) for n in (0, 1, 2, 4)}
arms |= {("CNN", n): replace(whole_cnn, shuffle=n) for n in (0, *cells)}
uncropped = "CIFAR-100, no crop"
arms["vanilla", uncropped] = changed(arms["vanilla", "CIFAR-100"], {"recipe.augment.crop": 0})
if vits.name == "paper":
    arms |= {("ViT", n): replace(whole_vit, shuffle=n) for n in (8, 16)}

# %% [markdown]
# The second and third seed of *vanilla* come with chapters 03 and 04.

# %%
again = {arm: vits.seeds[1:] for arm in arms if arm[1] in sets}
if vits.name == "desk":
    again = {("vanilla", "CIFAR-100"): (1, 2), ("vanilla", "CIFAR-10"): (1,)}
    again |= {("positional", name): (1,) for name in ("CIFAR-100", "CIFAR-10")}
    again |= {("CNN", cell): (1,) for cell in (0, 16)}
plan = [(*arm, 0) for arm in arms]
plan += [(*arm, seed) for arm, seeds in again.items() for seed in seeds]

runs = {key: replace(arms[key[:2]], seed=key[2]) for key in plan}
allowed = train or vits.name == "smoke"
records = obtain_many(runs.values(), train=allowed, partial=True)
done = {key: run for key, run in runs.items() if run in records}

# %% [markdown]
# What a run costs: minutes of one CPU core at `desk`, estimated from floating-point operations and, once recorded,
# measured; and of a GPU at `paper`, if it sustained 10 TFLOP/s. Convolutions reach less of a core's speed than the
# matrix products that the estimate is made for, and the clock runs on while a machine has other things to do.

# %% tags=["hide-input"]
kinds = {"ViT, CIFAR-100": (("vanilla", "CIFAR-100"), vanilla), "ViT, CIFAR-10": (("vanilla", "CIFAR-10"), vanilla)}
kinds |= {"ViT, shuffled (at paper with patches of 2 px)": (("ViT", 4), fine), "CNN": (("CNN", 0), cnn)}


def cost(arm: tuple, at_paper: Run) -> dict[str, float | None]:
    """Minutes of one run."""
    run = runs.get((*arm, 0))
    seconds = records[run].provenance["seconds"] if run in records else None
    return {
        "desk, estimated": minutes(run) if run and vits.name == "desk" else None,
        "desk, by the clock": seconds / 60 if seconds and vits.name == "desk" else None,
        "paper, estimated": minutes(at_paper, 1e13),
    }


finer = minutes(changed(desk.scale(fine), {"model.patch": 2})) / minutes(desk.scale(fine))
print(f"A ViT with patches of 2 px at desk, estimated: {finer:.1f} times one with 4 px.")
tidy(pd.DataFrame({name: cost(*pair) for name, pair in kinds.items()}).T.astype(float), 1)

# %% tags=["hide-input"]
index = pd.MultiIndex.from_tuples(list(done), names=["kind", "on", "seed"])
results = pd.Series([100 * records[run].accuracy for run in done.values()], index=index, dtype=float)
missing = Markdown("*Nothing to show yet: the runs for this are still being recorded.*")
config = arms["vanilla", "CIFAR-100"].model
grid, patch = config.grid, config.patch
N, T = grid[0] * grid[1], 1 + grid[0] * grid[1]
uniform = patch_distances(grid, "px", patch).mean().item()
touching = neighbours(grid).double().sum(1).mean().item()  # neighbours of a patch: fewer than 8 at the border


def of(kind: str, what: str | int) -> pd.Series:
    """Test accuracy (%) of an arm, one value a seed; empty when nothing is recorded."""
    return pd.Series({key[2]: results[key] for key in done if key[:2] == (kind, what)}, dtype=float)


def spread(values: pd.Series) -> tuple[float, int] | None:
    """Standard deviation over seeds, pooled over the arms that have several, and its degrees of freedom."""
    groups = [group for _, group in values.groupby(level=["kind", "on"])]
    return pooled_spread(groups) if any(len(group) > 1 for group in groups) else None


# %% [markdown]
# ## Is position enough?
#
# Test accuracy at the end of training, means over seeds; the difference is taken between runs of one seed.


# %% tags=["hide-input"]
def compared(name: str) -> dict[str, float | str]:
    """Both kinds of attention on one set; the difference is taken within seeds."""
    ours, plain = of("positional", name), of("vanilla", name)
    return {
        "vanilla (%)": plain.mean(), "its seeds": str(len(plain)), "positional (%)": ours.mean(),
        "its seeds ": str(len(ours)), "difference (points)": (ours - plain).dropna().mean(),
    }  # fmt: skip


pooled = spread(results) if done else None
table = pd.DataFrame({name: compared(name) for name in sets}).T
table.loc["source D, ImageNet"] = [71.9, "?", 68.9, "?", 68.9 - 71.9]
if pooled:
    print(
        f"95 % of single pairs that differ in nothing but the seed lie within ±{half_interval(pooled, 1, 1):.2f} points"
    )
tidy(table.infer_objects())

# %% mystnb={"figure": {"caption": "Test accuracy on CIFAR-100 while training goes on, bands from seed to seed. Does the gap open early, and does it close again?", "name": "fig-positional-course"}, "image": {"alt": "Test accuracy over epochs for vanilla and for positional attention."}} tags=["hide-input"]
courses: dict[str, list[pd.DataFrame]] = {}
for (kind, what, _), run in done.items():
    if what == "CIFAR-100":
        rows = [{"epoch": row["epoch"], "accuracy": 100 * row["accuracy"]} for row in records[run].measures]
        courses.setdefault(kind, []).append(pd.DataFrame(rows))
training_curves(courses, "accuracy", label="test accuracy (%)") if courses else missing

# %% [markdown]
# Source D's three points on ImageNet come from a ViT-tiny with patches of 16 px and 300 epochs of a recipe like DeiT's
# {cite:p}`touvron2021deit`; over how many runs, we do not know. On its three small sets it calls positional attention
# competitive, in the mean of ten seeds; those numbers we do not have.
#
# Mind what the comparison leaves in. The *values* still see everything, and so do the MLPs. Positional attention says
# only that nobody may choose, in view of the image, whom to listen to.
#
# ## The same for every image
#
# That is what the formula says; here it is on real images. For every weight $A_{ij}$ of every head we take the variance
# over images, and divide by the mean square of $A_{ij} - 1/T$, how far weights are from looking everywhere alike:
#
# $$
# \text{share of the image} = \frac{\operatorname{mean}_{ij} \operatorname{Var}_b\, A^{(b)}_{ij}}
# {\operatorname{mean}_{bij}\, (A^{(b)}_{ij} - 1/T)^2} .
# $$
#
# It is 0 if all images are looked at in the same way, and 1 if the heads have no habit at all: if their mean map over
# images is flat.

# %%
images = load_or_shapes(arms["vanilla", "CIFAR-100"].data, "test", limit=64)
x = images.normalise(images.images)  # [64, 3, 32, 32]


@torch.no_grad()
def look(model) -> Tensor:
    """Every head's attention on the images, [L, B, H, T, T]."""
    kept = model(x, capture=True)[1]
    maps = [attn for name, attn in kept.items() if name.endswith(".attn")]
    return torch.stack(maps)


def image_share(attn: Tensor) -> Tensor:
    """How much of a layer's attention depends on the image, [L]."""
    far = (attn - 1 / attn.shape[-1]).square().mean((1, 2, 3, 4))
    return attn.double().var(1, correction=0).mean((1, 2, 3)) / far


first = {kind: (kind, "CIFAR-100", 0) for kind in ("vanilla", "positional")}
pair = {kind: records[done[key]] for kind, key in first.items() if key in done}
attns = {kind: look(record.model()) for kind, record in pair.items()}


# %% tags=["hide-input"]
def share_of(kind: str) -> list[float] | None:
    """A layer's share of the image, kept beside the record: the set itself is not to be had everywhere."""
    run = done[first[kind]]

    def measure() -> dict:
        return {"share": image_share(attns[kind]).tolist(), "provenance": machine("cpu")}

    spec = {"run": run.id, "measure": "share of the image", "images": len(x), "version": 1}
    entry = remember(spec, measure, make=images.name == run.data)
    return entry["share"] if entry else None


if "positional" in attns:
    assert image_share(attns["positional"]).max() < 1e-9, "positional attention is the same for every image"
shares = {kind: share_of(kind) for kind in pair}
shares = pd.DataFrame({kind: share for kind, share in shares.items() if share}).rename_axis("layer")
tidy(shares, 3).T if len(shares) else missing

# %% [markdown]
# The row *vanilla* answers a question of its own: how much of what a ViT's heads do, when they are free to look, is
# habit? Where its share is small, attention is nearly fixed already. (64 images; a share says how much attention changes
# with the image, not whether the change is of use.) Or look for yourself: change the image, and the maps of the positional model stay as they are.

# %% tags=["hide-input"]
from vitbook.show import Explorer

pixels = images.images[:6].permute(0, 2, 3, 1).numpy()
labels = [images.classes[i] for i in images.labels[:6]]
maps = {kind: attn[:, :6].transpose(0, 1).numpy() for kind, attn in attns.items()}
Explorer.of(pixels, maps, grid, labels=labels, layer=0, head=0) if len(maps) == 2 else missing

# %% [markdown]
# ## Where do its heads look?
#
# As in chapter 02: distance and entropy of every head, its weight on the patch itself, on CLS and on the eight
# neighbours, the last three as multiples of what a head has that looks everywhere alike. (Seed 0; the figure of layers has
# all.)

# %% tags=["hide-input"]
finals = {kind: record.heads(unit="px") for kind, record in pair.items()}


def portrait(heads: pd.DataFrame) -> dict[str, float]:
    """Means over heads, and the nearest layer and head."""
    layers = heads.groupby("layer").distance.mean()
    return {
        "distance / uniform": heads.distance.mean() / uniform,
        "nearest layer": layers.idxmin(),
        "its distance / uniform": layers.min() / uniform,
        "nearest head / uniform": heads.distance.min() / uniform,
        "entropy / ln T": heads.entropy.mean() / log(T),
        "self, ×": heads["self"].mean() * T,
        "CLS, ×": heads.cls.mean() * T,
        "neighbours, ×": heads.neighbours.mean() * T / touching,
    }


tidy(pd.DataFrame({kind: portrait(heads) for kind, heads in finals.items()}), 2) if finals else missing

# %% mystnb={"figure": {"caption": "Distance by depth, CIFAR-100, seeds as bands. Is there a local layer without any view of the image, and is it where the vanilla model has its own?", "name": "fig-positional-layers"}, "image": {"alt": "Layer means of the attention distance by layer, for vanilla and positional attention, with the uniform value."}} tags=["hide-input"]
depths: dict[str, list[pd.DataFrame]] = {}
for (kind, what, _), run in done.items():
    if what == "CIFAR-100":
        depths.setdefault(kind, []).append(records[run].heads(unit="px"))
layer_profile(depths, uniform=uniform, label="distance (px)") if depths else missing

# %% mystnb={"figure": {"caption": "Every head, seed 0: near and selective at the lower left, everywhere at the cross. Where do heads go that cannot see?", "name": "fig-positional-plane"}, "image": {"alt": "Two scatter plots of attention entropy over distance, one for vanilla and one for positional attention, a dot a head coloured by layer."}} tags=["hide-input"]
distance_entropy_plane(finals, uniform=(uniform, log(T)), label="distance (px)") if finals else missing

# %% [markdown]
# One difference needs no experiment. A vanilla head's distance is a mean over images and places: it may be near on some
# images and far on others. A positional head's is a mean over places alone: its rows may still differ from place to
# place, but each is what it is on every image. Its map is the head.
#
# ## Images in pieces
#
# Now the other experiment. Cut every image into cells, and let them change places by **one** permutation for all images,
# in training and in testing. Nothing is lost that a model could not learn back in principle, for it is always the same
# permutation. What becomes of accuracy? Source D's Figure 5: a ViT's is flat in the size of the cells; a CNN's is poor
# for small cells and good for large ones.

# %% mystnb={"figure": {"caption": "One test image as the models get it, for cells of 1, 2, 4, 8 and 16 px, and whole. From which size on can you tell what it shows?", "name": "fig-positional-pieces"}, "image": {"alt": "The same image six times, cut into cells of growing size that have changed places, and once whole."}} tags=["hide-input"]
figure = new_figure(1.5)
for axes, cell in zip(figure.subplots(1, 6), (*cells, 0), strict=True):
    shown = grid_shuffle(images.images[0], cell) if cell else images.images[0]
    axes.imshow(shown.permute(1, 2, 0))
    axes.set_title(f"{cell} px" if cell else "whole", fontsize=8)
    axes.set(xticks=[], yticks=[])
figure

# %% [markdown]
# ### The symmetry
#
# A ViT knows where a patch is from one thing only, its row $p_j$ of $P$, which is added to it (and which positional
# attention reads). Take a shuffle whose cells are
# made of whole patches, so that place $k$ shows patch $\pi(k)$. Then the ViT with positions $p_k$, looking at shuffled
# images, does exactly what the ViT with positions $p'_{\pi(k)} = p_k$ does looking at whole ones: each patch arrives
# with the same vector, the sum over patches in attention knows no order, and CLS is not moved.
#
# It does not end with the forward pass. Equal logits have equal gradients, up to the same renumbering, and Adam works
# entry by entry. So the two go on alike for as long as training lasts:


# %%
Grid = tuple[int, int]


def patch_order(cell: int, grid: Grid = grid, side: int = patch) -> Tensor:
    """Which patch each place shows, [N], when whole patches change places."""
    numbers = torch.arange(grid[0] * grid[1]).view(grid)
    picture = numbers.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return grid_shuffle(picture, cell)[::side, ::side].flatten()


def twins(cell: int, attention: str) -> list[torch.nn.Module]:
    """A fresh ViT, and itself with its positions permuted."""
    torch.manual_seed(0)
    model = replace(config, attention=attention).build().double()
    twin, order = deepcopy(model), patch_order(cell)
    with torch.no_grad():
        twin.pos_embed[:, 1 + order] = model.pos_embed[:, 1:].clone()
    return [model, twin]


# %%
def drift(cell: int, attention: str, steps: int = 5) -> dict[str, float]:
    """Largest difference of the twins' logits before and after training."""
    nets = twins(cell, attention)
    whole = x[:32].double()
    pieces = grid_shuffle(whole, cell)
    optimisers = [torch.optim.AdamW(net.parameters(), lr=3e-3) for net in nets]
    found = {}
    for step in range(steps + 1):
        logits = nets[0](pieces), nets[1](whole)
        if step in (0, steps):
            far = (logits[0] - logits[1]).abs().max()
            found[f"after {step} steps"] = far.item()
        for optimiser, given in zip(optimisers, logits, strict=True):
            optimiser.zero_grad()
            F.cross_entropy(given, images.labels[:32]).backward()
            optimiser.step()
    far = (nets[0](pieces) - nets[0](whole)).abs().max()
    return found | {"same model, whole": far.item()}


# %%
tried = [(a, c) for a in ("plain", "positional") for c in (patch, 2 * patch)]
identity = pd.DataFrame({(a, c): drift(c, a) for a, c in tried}).T
identity.rename_axis(["attention", "cells (px)"]).map("{:.0e}".format)

# %% [markdown]
# In double precision, so that rounding does not blur the point; in a real training it grows from step to step, until
# the two differ as two seeds do. The last column is how much the same model's logits change on whole images. Since fresh position embeddings are drawn independently, the
# permuted ones are as likely as the original; hence **a shuffled run is, in distribution, an unshuffled one**: as if its
# positions had been drawn once more. That is
# all that "flat in cell size" says, as long as no cell cuts a patch. Source D made sure of it by patches of 2 px. It is
# a property of the architecture, and of positional attention just as well. No run can find it, or fail to.
#
# One condition is easy to overlook: the shuffle must come *last*. Here images are cropped and mirrored first and then
# cut. Shuffled first and cropped afterwards, cells would no longer lie on the grid of the patches, and the symmetry would
# be gone. Which of the two source D did, we cannot tell.
#
# ### The findings
#
# What is left to find out is what no symmetry decides: what happens to the ViT when cells are **smaller** than a patch,
# so that a patch is a mixture of scraps, and what happens to the CNN, whose filters expect neighbours next to each other.


# %% tags=["hide-input"]
def torn(cell: int) -> dict[str, float]:
    """Of how many patches a patch of the shuffled image is made."""
    (rows, columns), side = arms["ViT", 0].model.grid, arms["ViT", 0].model.patch
    numbers = torch.arange(rows * columns).view(rows, columns).repeat_interleave(side, 0).repeat_interleave(side, 1)
    shuffled = grid_shuffle(numbers, cell)
    pieces = shuffled.unfold(0, side, side).unfold(1, side, side).reshape(rows * columns, -1)
    sources = [len(piece.unique()) for piece in pieces]
    found = {"cells": numbers.numel() // cell**2, "a patch holds scraps of": sum(sources) / len(sources)}
    return found | {"pixels in another patch": (shuffled != numbers).double().mean().item()}


rows = {cell: torn(cell) for cell in cells}
for cell in cells:
    rows[cell] |= {"ViT (%)": of("ViT", cell).mean(), "CNN (%)": of("CNN", cell).mean()}
rows["whole"] = {"ViT (%)": of("ViT", 0).mean(), "CNN (%)": of("CNN", 0).mean()}
shuffles = pd.DataFrame(rows).T.rename_axis("cells (px)")
for kind in ("ViT", "CNN"):
    shuffles[f"{kind}, of whole (%)"] = 100 * shuffles[f"{kind} (%)"] / of(kind, 0).mean()
tidy(shuffles.astype({"cells": "Int64"}))


# %% tags=["hide-input"]
def by_cell() -> Figure:
    """Accuracy over cell size; where symmetry decides, the ViT's line is dashed."""
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    place = dict(zip((*cells, 0), range(6), strict=True))
    base, side = of("ViT", 0).mean(), arms["ViT", 0].model.patch
    aligned = [cell for cell in cells if cell % side == 0]
    axes.plot([place[aligned[0]], place[0]], [base] * 2, ls="--", color="#0072B2", label="ViT, by symmetry")
    for kind, colour in (("ViT", "#0072B2"), ("CNN", "#D55E00")):
        seen = [(place[cell], of(kind, cell).mean()) for cell in place if len(of(kind, cell))]
        line = "-" if kind == "CNN" else ""
        name = f"ViT, patches of {side} px" if kind == "ViT" else kind
        if seen:
            axes.plot(*zip(*seen, strict=True), marker="o", ls=line, color=colour, label=name)
    if pooled:
        far = half_interval(pooled, 1, len(of("ViT", 0)))
        axes.fill_between([place[aligned[0]], place[0]], base - far, base + far, color="#0072B2", alpha=0.12, lw=0)
    axes.axvline(place[aligned[0]] - 0.5, color="#6F6F6F", linewidth=1)
    axes.text(place[aligned[0]] - 0.55, axes.get_ylim()[0], "cells cut patches ", ha="right", va="bottom", fontsize=7)
    axes.set_xticks(list(place.values()), [f"{cell} px" if cell else "whole" for cell in place])
    axes.set(xlabel="cells that change places", ylabel="test accuracy (%)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


# %% mystnb={"figure": {"caption": "Test accuracy on CIFAR-100 in pieces. Right of the grey line the ViT's value is settled beforehand; left of it, and for the CNN, it had to be measured. The band holds 95 % of single unshuffled runs, by the pooled spread. Who loses more when single pixels change places?", "name": "fig-positional-cells"}, "image": {"alt": "Test accuracy over cell size for a ViT and a CNN, with the ViT's value on whole images as a dashed line."}} tags=["hide-input"]
by_cell() if len(of("ViT", 0)) else missing

# %% [markdown]
# Dots of the ViT right of the grey line are controls. They should scatter about the dashed line as seeds do, and if they
# did not, the code would be wrong. Guessing gives 1 %. With cells of 16 px there are only four pieces, and by our order
# the two lower ones stay side by side: the lower half of the picture moves up in one piece. Of the nine ways to move all
# four, three keep no two neighbours together, four keep one pair as ours does, and two keep two pairs. A second seed
# trains on the same order, so the interval of that claim does not hold this chance.
#
# The CNN begins with filters of 7 × 7 px in steps of two and a maximum over 3 × 3. Its view is local by construction, and
# weights are shared over places: it has no simple way to undo a permutation that differs from place to place. The ViT is
# not above such things either: its patch embedding is one matrix for all places. Below the patch size every place holds
# another mixture of scraps, and that one matrix has to serve them all. What remains to the ViT, and not to the CNN, is a
# way to bring far-off scraps together in a single step.
#
# ## Do positions know their neighbours?
#
# Back to what gave the source its title. Take the position embeddings of a trained ViT and the cosines of every pair,
# $\cos(p_i, p_j)$. Source D shows $P^{\top}P$, rescaled and cut at 0.55, before and after training on ImageNet; the
# trained ones show local blocks (its Figure 1). {cite:t}`dosovitskiy2021image` printed such maps for the first ViT. They show
# a pattern; how strong is it, beyond chance?
#
# **A number.** The mean cosine of two patches that touch, compared with the same embeddings dealt out to the patches in
# a random order. Over all $N!$ orders its mean is the mean over all pairs, and its standard deviation is known in
# closed form {cite:p}`mantel1967detection`; so
#
# $$
# z = \frac{\operatorname{mean}_{i \text{ touches } j} \cos(p_i, p_j) - \operatorname{mean}_{i \ne j} \cos(p_i, p_j)}
# {\mathrm{sd\ over\ all\ orders}} .
# $$
#
# Without a pattern $z$ scatters about 0 with deviation 1. Beside it stands where 95 % of 2,000 random orders lie.
#
# One pattern would pass for locality, and for the threshold of our claims as well: patches at the border may be alike because padded crops treat them alike, and they
# touch each other. So the same number is given for the *inside*, without the outermost ring of patches (on fewer pairs
# the same pattern gives a smaller $z$).


# %%
def inside(similarity: Tensor, grid: tuple[int, int]) -> float:
    """z of the patches that do not touch the border."""
    rows, columns = grid
    kept = torch.arange(rows * columns).view(grid)[1:-1, 1:-1].flatten()
    return neighbour_similarity(similarity[kept][:, kept], (rows - 2, columns - 2))["z"]


def knows(key: tuple, at: str = "weights") -> dict | None:
    """How alike neighbours are in a recorded model; kept beside its record."""
    run = done[key]
    weights, model = getattr(records[run], at), run.model

    def measure() -> dict:
        similarity = position_similarity(weights["pos_embed"], model.prefix)
        alike = neighbour_similarity(similarity, model.grid) | {"z inside": inside(similarity, model.grid)}
        return {"alike": alike, "provenance": machine("cpu")}

    spec = {"run": run.id, "measure": "position similarity", "version": 3}
    entry = remember(spec | {"at": at}, measure, make=weights is not None)
    return entry["alike"] if entry else None


# %%
untrained = []
for seed in range(20):
    torch.manual_seed(seed)
    untrained.append(config.build().pos_embed.detach())
alike = [position_similarity(p) for p in untrained]
starts = pd.DataFrame([neighbour_similarity(pairs, grid) | {"z inside": inside(pairs, grid)} for pairs in alike])
rim = F.pad(torch.zeros(grid[0] - 2, grid[1] - 2), (1, 1, 1, 1), value=1).flatten()
border = neighbour_similarity((rim[:, None] == rim).double(), grid)["z"]  # alike on the rim, alike inside, and no more

# %% tags=["hide-input"]
known = {("untrained", f"{len(starts)} starts"): starts.mean()}
for kind in ("vanilla", "positional"):
    for name in (*sets, uncropped):
        for seed in [s for k, n, s in done if (k, n) == (kind, name)]:
            for at, when in (("warmup", "end of warmup"), ("weights", "trained")):
                if found := knows((kind, name, seed), at):
                    known[f"{kind}, {name}", f"{when}, seed {seed}"] = found


def listed(found: dict[tuple, dict]) -> pd.DataFrame:
    """For the page: what :func:`neighbour_similarity` gave, a row each."""
    table = pd.DataFrame(found).T.round({"z": 1, "z inside": 1}).round(3) + 0.0  # no "-0.0"
    span = [f"{low:.3f} to {high:.3f}" for low, high in zip(table.pop("low"), table.pop("high"), strict=True)]
    table.insert(3, "95 % of orders", span)
    return table


print(f"z of {len(starts)} untrained models: {starts.z.mean():.2f} ± {starts.z.std():.2f}")
print(f"z of a pattern that knows the border and nothing else: {border:.1f}")
listed(known)


# %% tags=["hide-input"]
def mosaic(similarity: Tensor, grid: tuple[int, int] = grid) -> Tensor:
    """A tile for every patch, at its place: how alike all patches are to it."""
    rows, columns = grid
    tiles = torch.full((rows, columns, rows + 1, columns + 1), torch.nan)  # a thin gap between tiles
    tiles[:, :, :rows, :columns] = similarity.fill_diagonal_(torch.nan).view(rows, columns, rows, columns)
    return tiles.transpose(1, 2).reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]


def draw(panels: dict[str, Tensor | None], columns: int) -> Figure:
    """Mosaics of position embeddings [T, D], all in one scale of colours; an empty place where there are none."""
    rows = -(-len(panels) // columns)
    figure = new_figure(0.3 + 6.6 / columns * rows)
    places = figure.subplots(rows, columns, squeeze=False)
    tiles = {name: p if p is None else mosaic(position_similarity(p)) for name, p in panels.items()}
    top = max(tile.nan_to_num(0).abs().max().item() for tile in tiles.values() if tile is not None)
    for axes in places.flat:
        axes.set_axis_off()
    for axes, (name, tile) in zip(places.flat, tiles.items(), strict=False):
        if tile is None:
            continue
        shown = axes.imshow(tile, cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set_title(name, fontsize=8)
    figure.colorbar(shown, ax=places, shrink=0.6, aspect=30, label="cosine").outline.set_visible(False)
    return figure


# %% tags=["hide-input"]
def embeddings(key: tuple, at: str) -> Tensor | None:
    """A recorded model's position embeddings [1,T,D], kept by themselves: the book ships no weights of earlier epochs."""
    weights = getattr(records[done[key]], at)

    def keep() -> dict:
        return {"positions": {"pos_embed": weights["pos_embed"]}, "provenance": machine("cpu")}

    spec = {"run": done[key].id, "measure": "position embeddings", "at": at, "version": 2}
    entry = remember(spec, keep, make=weights is not None)
    return entry["positions"]["pos_embed"] if entry else None


# %% mystnb={"figure": {"caption": "Similarities of position embeddings, a tile a patch (its own place left out), before training, at the end of warmup and after it. In which tiles does a warm spot follow the tile's place?", "name": "fig-positional-similar"}, "image": {"alt": "Mosaics of cosine similarity maps for vanilla and positional attention, at the start, after warmup and trained."}} tags=["hide-input"]
stages = {}
for kind in pair:
    stages[f"{kind}: untrained"] = untrained[0]  # both start from seed 0
    for at, when in (("warmup", "end of warmup"), ("weights", "trained")):
        stages[f"{kind}: {when}"] = embeddings(first[kind], at)
draw(stages, 3) if stages else missing

# %% [markdown]
# **Here no symmetry decides.** To the architecture all orders of the patches are one and the same, and embeddings might as
# well stay as they are drawn. If neighbours become alike, it has to come from the images as the model gets them, by way
# of gradient descent. Two things there know who is near: the pictures, where what is near belongs together, and the
# random crops, which shift them by up to one patch, so that the same piece appears now here and now next door. The rows
# *no crop* tell them apart: that model was trained without the second. That is the real-image side of chapter 07, whose
# toy model has nothing *but* positional attention.

# %% tags=["hide-input"]
with_crops, without = (known.get((f"vanilla, {name}", "trained, seed 0")) for name in ("CIFAR-100", uncropped))
decided = missing
if with_crops and without:
    does = "do teach" if without["z"] >= 5 else "do not teach"
    decided = Markdown(
        f"With crops, $z$ ends at {with_crops['z']:.1f} ({with_crops['z inside']:.1f} inside), without them at "
        f"{without['z']:.1f} ({without['z inside']:.1f}): the pictures alone **{does}** who is near."
    )
decided

# %% [markdown]
# What the number does not say: that similar embeddings are *used* to look at neighbours. In vanilla attention a
# position can also matter because the value at that place tends to be the sky. For positional attention the link is
# tight, since $A$ is made from $P$; even there $W^q$ and $W^k$ stand between similarity and attention.
#
# ## Permuted patches
#
# Source D's last experiment (Figures 5 and 8): train on CIFAR-100 with patches in a permuted order. The similarities
# then show no local pattern; undo the permutation, and it appears. By the symmetry above it could not be otherwise, if a
# plain run shows the pattern: the permuted run *is*, in distribution, a plain run whose rows of $P$ are renumbered, and
# an order drawn at random shows no pattern.

# %% tags=["hide-input"]
order = patch_order(patch)
mixed, kind_of_mixed = None, "the permutation run"
if ("ViT", 4, 0) in done and arms["ViT", 4].model == config:
    mixed = records[done["ViT", 4, 0]].weights["pos_embed"][0]
elif "vanilla" in pair:
    plain = pair["vanilla"].weights["pos_embed"][0]
    mixed = torch.cat([plain[:1], plain[1:][order]])  # place k has what belongs to the patch it shows
    kind_of_mixed = "the unshuffled model with its positions permuted, which is the same by symmetry"
undone = None if mixed is None else torch.cat([mixed[:1], mixed[1:][order.argsort()]])
Markdown(f"The next two figures show {kind_of_mixed}." if mixed is not None else missing.data)

# %% mystnb={"figure": {"caption": "Every patch, trained on permuted patches: as the model has them (left), and in the order of the image (right). Is there a pattern on the left that the eye can find?", "name": "fig-positional-permuted"}, "image": {"alt": "Two mosaics of similarity maps, without pattern before the permutation is undone and with warm spots around each tile's place after."}} tags=["hide-input"]
draw({"as trained": mixed, "permutation undone": undone}, 2) if mixed is not None else missing


# %% tags=["hide-input"]
def two_patches(patches: tuple[int, int]) -> Figure:
    """Source D's Figure 5: two patches, before and after undoing."""
    figure = new_figure(2.2)
    panels = figure.subplots(1, 4)
    for axes, (patch_number, after) in zip(panels, [(p, a) for p in patches for a in (False, True)], strict=True):
        shown = position_similarity(undone if after else mixed)
        spot = patch_number if after else (order == patch_number).nonzero().item()
        axes.imshow(shown[spot].view(grid), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.plot(spot % grid[1], spot // grid[1], marker="s", ms=7, mfc="none", mec="black")
        axes.set_title(f"patch {divmod(patch_number, grid[1])}, {'undone' if after else 'as trained'}", fontsize=7)
        axes.set(xticks=[], yticks=[])
    return figure


# %% mystnb={"figure": {"caption": "Two of these patches by themselves, as in source D's Figure 5; the square marks the patch. Colours run from \u22121 to 1.", "name": "fig-positional-two"}, "image": {"alt": "Four small maps: similarity to two patches, scattered as trained and gathered around the patch when the permutation is undone."}} tags=["hide-input"]
two_patches((2 * grid[1] + 2, 4 * grid[1] + 5)) if mixed is not None else missing


# %% tags=["hide-input"]
def before_after(key: tuple) -> dict[str, dict[str, float]]:
    """How alike neighbours are in a shuffled ViT, as trained and, where cells are whole patches, put back in order."""
    run = done[key]
    model, positions = run.model, records[run].weights["pos_embed"][0, run.model.prefix :]
    stages = {"as trained": positions}
    if run.shuffle % model.patch == 0:
        stages["undone"] = positions[patch_order(run.shuffle, model.grid, model.patch).argsort()]
    return {when: neighbour_similarity(position_similarity(p, 0), model.grid) for when, p in stages.items()}


undoing = {key: before_after(key) for key in done if key[0] == "ViT" and key[1]}
shuffled = {(f"cells of {k[1]} px", when): row for k, rows in undoing.items() for when, row in rows.items()}
listed(shuffled) if shuffled else missing

# %% [markdown]
# Where cells are smaller than patches there is no order of patches to undo. Cells of one pixel look like a counter-check:
# no neighbours in the images, none among the positions. But this is one more symmetry. An order of all pixels drawn at
# random and the same order with its patches renumbered are equally likely; no two places are set apart, and $z$ scatters
# about 0 with deviation 1 whatever the model learns. So it does for untrained models. Both stand among the claims as
# controls: a large $z$ would mean that the code, and not the image, knows the grid.
#
# ## What became of the claims
#
# A difference is taken within a seed. The spread over seeds comes from the arms that have several, pooled, and times
# $\sqrt2$ for a difference (or from the differences themselves, where these have more degrees of freedom); it supposes
# that the CNN scatters as the ViTs do. The flatness of the ViT, and the two claims that $z$ is small,
# stand among the claims as what they are: controls; those on $z$ borrow the spread of untrained models.

# %%
from pathlib import Path

from vitbook.show import claim_cards, judge, load_claims

asked = {
    "close-cifar100": (("positional", "CIFAR-100"), ("vanilla", "CIFAR-100")),
    "close-cifar10": (("positional", "CIFAR-10"), ("vanilla", "CIFAR-10")),
    **{f"cnn-cells-{cell}": (("CNN", cell), ("CNN", 0)) for cell in (1, 2, 16)},
    "vit-control": (("ViT", 4), ("ViT", 0)),
    "vit-below": (("ViT", 1), ("ViT", 0)),
}
claims = load_claims(Path("../book/claims.yml"))
chance = (sqrt(2) * pooled[0], pooled[1]) if pooled else None
verdicts = []
for name, (arm, base) in asked.items():
    values = (of(*arm) - of(*base)).dropna()
    if len(values):
        used = [done[(*a, n)].id for a in (arm, base) for n in values.index]
        how = {"profile": vits.name, "records": used, "pooled_sd": chance}
        verdicts.append(judge(claims[f"positional.{name}"], values, **how))

# %%
scores = {key: knows(key) for key in done if key[1] in sets}
scores = {key: found["z"] for key, found in scores.items() if found}
keys = pd.MultiIndex.from_tuples(list(scores), names=["kind", "on", "seed"])
scores = pd.Series(list(scores.values()), index=keys, dtype=float)
for kind in pair:
    own = scores.xs((kind, "CIFAR-100"), level=("kind", "on"))
    used = [done[kind, "CIFAR-100", seed].id for seed in own.index]
    how = {"profile": vits.name, "records": used, "pooled_sd": spread(scores)}
    verdicts.append(judge(claims[f"positional.local-{kind}"], own, **how))
if torn_up := [key for key in done if key[:2] == ("ViT", 1)]:
    own = [undoing[key]["as trained"]["z"] for key in torn_up]
    by_chance = (starts.z.std(), len(starts) - 1)  # without a pattern: by symmetry as untrained models scatter
    how = {"profile": vits.name, "records": [done[key].id for key in torn_up], "pooled_sd": by_chance}
    verdicts.append(judge(claims["positional.local-pieces"], own, **how))
if pair:
    claim = claims["positional.local-untrained"]
    verdicts.append(judge(claim, starts.z, profile=vits.name))
    farthest = identity.filter(like="after").max().max()
    verdicts.append(judge(claims["positional.vit-identity"], farthest, profile=vits.name, exact=True))
total = sum(claim.chapter == "08_positional" for claim in claims.values())
if waits := total - len(verdicts):
    print(f"{waits} of {total} claims wait for their recordings.")
claim_cards(claims, verdicts) if verdicts else missing


# %% tags=["hide-input"]
def how_alike(kind: str) -> str:
    """Cosine of neighbours' positions and of any pair's, after training."""
    found = knows(first[kind])
    return f"{found['neighbours']:.2f} against {found['pairs']:.2f} of any pair (z = {found['z']:.0f})"


# %% tags=["hide-input"]
def answered() -> str:
    """The sentence at the top of the page, made from the records."""
    gaps = {name: (of("positional", name) - of("vanilla", name)).dropna().mean() for name in ("CIFAR-100", "CIFAR-10")}
    lost = {kind: of(kind, 1).mean() - of(kind, 0).mean() for kind in ("ViT", "CNN")}
    data = "made-up images" if vits.name == "smoke" else "CIFAR-100"
    return (
        f"**In a ViT of {config.depth} layers × {config.dim}, attention that reads positions alone changes accuracy by "
        f"{gaps['CIFAR-100']:+.1f} points on {data} and by {gaps['CIFAR-10']:+.1f} on "
        f"{'the same' if vits.name == 'smoke' else 'CIFAR-10'}; with all pixels in other places the ViT changes by "
        f"{lost['ViT']:+.1f} points and the CNN by {lost['CNN']:+.1f}, while shuffling whole patches, done last, "
        f"leaves a ViT's chances as they were. The cosine of neighbours' position embeddings, at the start that of any "
        f"pair (z = {starts.z.mean():.1f}), ends at {how_alike('vanilla')}, with positional attention at "
        f"{how_alike('positional')}, seed 0.**"
    )


needed = [("vanilla", n) for n in ("CIFAR-100", "CIFAR-10")] + [("positional", n) for n in ("CIFAR-100", "CIFAR-10")]
needed += [(kind, cell) for kind in ("ViT", "CNN") for cell in (0, 1)]
ready = all((*arm, 0) in done for arm in needed)
counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in dict.fromkeys(v.verdict for v in verdicts)}
tally = "; ".join(f"*{kind}* {count}" for kind, count in counts.items())
waiting = f"**The recordings are still being made: {len(done)} of {len(runs)} runs are there.**"
answer.update(Markdown((answered() if ready else waiting) + (f"\n\nClaims: {tally}." if verdicts else "")))

# %% [markdown]
# ## Limits
#
# One architecture, smaller than source D's, a quarter of its epochs or fewer, on CIFAR-100 half of the images. Most arms
# have one seed. The shuffles use one permutation for each size of cells; another one of four quarters may well be harder
# or easier. All models share one learning rate, and neither the CNN nor positional attention was given the chance to
# choose its own.
#
# Our positional attention is one of several that fit the source's description. A table of positions for every layer, or
# logits as free parameters, would be others, and a gap of a few points may depend on such a choice.
#
# $z$ tests one pattern, that of touching patches, against no pattern at all. Rows and columns, which position embeddings
# are known to learn as well, count only where they make neighbours alike. And $z$ grows with the number of patches: it
# says how sure one can be, not how local a model is.
#
# What source D leaves unsaid, or what we could not read: learning rate, weight decay and augmentation of the small
# experiments; their accuracies; the CNN; on which set the accuracy under shuffling was measured; whether cells change
# places before or after augmentation; how each layer of a positional ViT reads the positions.
#
# ## Exercise
#
# *What are positions worth?* Take them away: `positions=False` makes an image a bag of patches. On 5,000 images for 20
# epochs, train three models from the same seed: vanilla, positional, and the bag. **Predict first:** which two lie
# closer together? And what will the bag do when it is tested, without new training, on images whose patches have
# changed places? Then set `try_it = True`: some four minutes on two cores. The check asks that question of all three.
# And the harder one: for cells of *one pixel*, which architecture would be as indifferent as a ViT is for whole patches?

# %%
try_it = False
if try_it:
    brief = {"limit": 5_000, "recipe.epochs": 20, "recipe.warmup": 2}
    base = changed(desk.scale(vanilla), brief)
    trial = {
        "vanilla": base,
        "positional": changed(base, {"model.attention": "positional"}),
        "bag of patches": changed(base, {"model.positions": False}),
    }
    trained, found = obtain_many(trial.values()), {}
    with torch.no_grad():
        for name, run in trial.items():
            net = trained[run].model()
            found[name] = {"accuracy (%)": 100 * trained[run].accuracy}
            for cell in (4, 2):
                far = (net(x) - net(grid_shuffle(x, cell))).abs().max()
                found[name][f"logits move, cells of {cell} px"] = far.item()
    found = pd.DataFrame(found).T
    display(found.round(3))
    # The check.
    whole, torn_up = found.iloc[:, 1], found.iloc[:, 2]
    assert whole["bag of patches"] < 1e-3, "a bag has no order"
    assert whole.drop("bag of patches").min() > 0.01, "the others have one"
    assert torn_up.min() > 0.01, "what is inside a patch counts for all three"
    print("Sound.")

# %% [markdown]
# ## References
#
# The claims: {cite:t}`jelassi2022spatial`. Maps of position similarity: {cite:t}`dosovitskiy2021image`. Positional
# attention as convolution: {cite:t}`cordonnier2020relationship`; fixed mixing of tokens: {cite:t}`tolstikhin2021mixer`.
# The permutation test in closed form: {cite:t}`mantel1967detection`. The CNN: {cite:t}`he2016resnet`, from timm
# {cite:p}`wightman2019timm`. Data: {cite:t}`krizhevsky2009cifar`, {cite:t}`netzer2011svhn`.

# %% tags=["remove-input"]
from vitbook.show import provenance_line

provenance_line([record.provenance for record in records.values()], vits.name)
