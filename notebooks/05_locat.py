# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Can a ViT be talked into looking nearby? LocAt, part by part

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
# | **question** | A Gaussian that pulls every patch towards its surroundings, and a last step that lets the loss reach the patches: what is each worth, and do heads become local? |
# | **claim under test** | source C {cite:p}`hajimiri2026locat`: both help, together most, with next to no parameters; patches keep what they saw |
# | **its numbers** | +4 to +7 points on CIFAR-100; ImageNet-1K, ViT Tiny: +1.55 points (second-hand) for 2,340 parameters |
# | **what is run** | ViT, + GAug, + PRR, both, a mean over patches in place of CLS; without positions; seven changes of the Gaussian |
# | **to take home** | a bump is no penalty; and who is not read by the loss is not taught by it |
#
# In chapters 02 to 04 heads became local by themselves or not at all. Source C asks for it: LocAt adds a *Gaussian
# augmentation* (GAug) to the logits of every layer and a *patch representation refinement* (PRR) before the head. Here
# both are built from one query of one head, then taken apart. What they do for segmentation, for which the source made
# them, is the subject of chapter 06.

# %% tags=["parameters", "hide-input"]
profile: str = "desk"
train: bool = False  # True: train what is not recorded

# %% tags=["hide-input"]
from dataclasses import replace
from math import log, sqrt

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from vitbook.data import Augment, grid_shuffle, load, load_or_shapes
from vitbook.measures.heads import measure_heads, neighbours, patch_distances
from vitbook.measures.signals import measure_tokens, pair_similarity
from vitbook.models.vit import ViTConfig
from vitbook.runs import Profile, Recipe, Run, changed, choose, minutes, obtain_many, recording, remember
from vitbook.runs.training import machine, table_to_json
from vitbook.show import half_interval, house_style, layer_profile, new_figure, pooled_spread, tidy, training_curves

house_style()

# %% [markdown]
# ## What the loss reads
#
# A ViT with a CLS token is trained through one row. After the last block, the head reads CLS and throws the patches
# away: the loss asks nothing of them. Further down a patch counts as far as later tokens look at it, and what it is
# asked for then is whatever CLS can use to name the whole image. Nothing asks patch $p$ to say what is *at* $p$. Source
# C's diagnosis: so patches turn into copies of CLS with depth, and frozen features are poor material for segmentation.
#
# Its remedy has two parts, which may be had one by one. So there are four models, and a fifth that is the obvious
# rival of PRR, a mean over patches {cite:p}`raghu2021see`; chapter 04 has it too, and like there it comes without CLS.

# %%
paper = Run(
    "cifar100",
    ViTConfig(dim=192, depth=12, heads=3, mlp_ratio=4),  # ViT Tiny
    Recipe(
        epochs=200, batch=256, lr=1e-3, warmup=10, min_lr=1e-5, clip=1.0,
        augment=Augment(policy="cifar10", cutmix=1.0, mix_p=0.5, smoothing=0.1),
    ),
)  # fmt: skip
both = {"model.attention": "gaug", "model.refine": True}
parts = {
    "ViT": {},
    "+GAug": {"model.attention": "gaug"},
    "+PRR": {"model.refine": True},
    "LocAt": both,
    "mean pool": {"model.pool": "mean", "model.cls_token": False},
    "ViT, no positions": {"model.positions": False},
    "LocAt, no positions": both | {"model.positions": False},
}
variants = {
    "no scale": "gaug-no-scale", "fixed width": "gaug-fixed-width",
    "isotropic": "gaug-isotropic", "auto-α": "gaug-auto-scale",
    "Laplace": "laplace", "inverse distance": "inverse-distance",
    "Σ from input": "gaug-from-input",
}  # fmt: skip

# %% [markdown]
# The source's recipe for CIFAR-100 is not known, neither size of image and patch nor epochs; its code holds the recipe
# for ImageNet-1K. So `paper` here is **our choice**: its smallest backbone, on patches that leave a grid worth
# speaking of, trained by the *Modern* recipe of chapter 04.
#
# | | source C, ImageNet-1K | source C, CIFAR-100 | this page, `paper` |
# | - | - | - | - |
# | model | ViT Tiny: 12 layers × 192, 3 heads | not known | the same |
# | patches | 14 × 14 of 16 px | not known | 8 × 8 of 4 px |
# | epochs, batch | 300, 1,024 | not known | 200, 256 |
# | rate | 1e-3; linear up for 20 epochs, linear down | not known | 1e-3; linear up for 10, cosine down |
# | mixing | MixUp or CutMix, every batch | not known | CutMix, half of the batches |
# | augmentation | RandAugment, erasing | not known | AutoAugment, crop, mirror |
# | smoothing, drop path | 0.1, 0.1 | not known | 0.1, none |
# | optimiser | AdamW, decay 0.05, clip 5 | not known | AdamW, decay 0.05, clip 1 |
#
# ## The scale of this page

# %%
schedule = 50  # epochs, the shorter of chapter 04's two
small = {
    "limit": 25_000, "model.dim": 64, "model.depth": 6, "model.heads": 4,
    "model.mlp_ratio": 2, "recipe.epochs": schedule, "recipe.warmup": 5,
    "recipe.batch": 64, "recipe.lr": 3e-3, "recipe.min_lr": 0.0,
    "recipe.clip": None, "recipe.augment.mix_p": 1.0,
}  # fmt: skip
tiny = {
    "data": "shapes", "limit": 256, "model.image": 32, "model.patch": 8,
    "model.classes": 10, "model.dim": 16, "model.depth": 2, "model.heads": 2,
    "recipe.epochs": 2, "recipe.warmup": 0, "recipe.batch": 64,
}  # fmt: skip
desk = Profile("desk", small, seeds=(0, 1))
scale = choose(profile, desk, Profile("smoke", tiny))
scale.differences(paper)

# %% [markdown]
# At `desk` the plain ViT is chapter 04's Modern: not a model like it, but the same record.

# %%
arms = {name: scale.scale(changed(paper, part)) for name, part in parts.items()}
for name, flavour in variants.items():
    arms[name] = changed(arms["LocAt"], {"model.attention": flavour})

main = ("ViT", "+GAug", "+PRR", "LocAt", "mean pool")
wide = ("ViT, wide heads", "+PRR, wide heads")  # PRR mixes by the width of a head: here twice that of the others
for name in ("ViT", "+PRR"):
    arms[f"{name}, wide heads"] = changed(arms[name], {"model.heads": arms[name].model.heads // 2})
order = [(arm, seed) for seed in scale.seeds for arm in main]
order += [("LocAt, no positions", 0), ("ViT, no positions", 0)]
order += [(arm, 0) for arm in list(variants)[:5]]
order += [("ViT", 2), ("LocAt", 2), *((arm, 0) for arm in wide)]
order += [("isotropic", 1), ("auto-α", 1)]  # one pair can hardly show "about equal"
order += [("inverse distance", 0), ("Σ from input", 0)]

runs = {(arm, seed): replace(arms[arm], seed=seed) for arm, seed in order}
fresh = train or scale.name == "smoke"  # may this page train?
records = obtain_many(runs.values(), train=fresh, partial=True)
done = {key: run for key, run in runs.items() if run in records}

# %% [markdown]
# What it costs, from floating-point operations: of one run, and of all that this page asks for. GAug's exponentials are
# not among what is counted; the last column says how much longer its runs have really taken than the plain ones, on a
# machine that had other work as well. No GPU was at hand for `paper`; a model this narrow reaches a small part of what
# one can do.


# %% tags=["hide-input"]
def taken(arm: str) -> float:
    """Recorded seconds of training, of the runs made on the machine of the plain ViT's first."""
    where = records[done["ViT", 0]].provenance["device"] if ("ViT", 0) in done else None
    found = [records[run].provenance for (name, _), run in done.items() if name == arm]
    seconds = [p["seconds"] for p in found if p["device"] == where]
    return np.mean(seconds) if seconds else np.nan


costs = pd.DataFrame({
    arm: {
        "desk, a core (min)": minutes(desk.scale(changed(paper, parts[arm]))),
        "paper at 10 TFLOP/s (min)": minutes(changed(paper, parts[arm]), 1e13),
        "paper at 100 TFLOP/s (min)": minutes(changed(paper, parts[arm]), 1e14),
        "time taken / plain": taken(arm) / taken("ViT"),
    }
    for arm in main
}).T  # fmt: skip
total = sum(minutes(run) for run in runs.values())
print(f"{scale.name}: {len(runs)} runs, about {total:.0f} core-minutes together")
tidy(costs, 1)

# %% tags=["hide-input"]
config = arms["ViT"].model
grid, patch, depth, heads = config.grid, config.patch, config.depth, config.heads
rows, cols = grid
N, T = rows * cols, rows * cols + 1
bound = max(grid)  # of σ, in patches
uniform = patch_distances(grid, "max").mean().item()
touching = neighbours(grid).double()
missing = Markdown("*Nothing to show yet: the runs for this are still being recorded.*")
images = load_or_shapes(arms["ViT"].data, "test", limit=6)
x = images.normalise(images.images)


def specimen(arm: str) -> torch.nn.Module:
    """Seed 0 of an arm for a look inside; untrained where it is not recorded."""
    if (arm, 0) in done:
        return records[done[arm, 0]].model().requires_grad_(False)
    print(f"Note: {arm} is not recorded yet; what follows shows it untrained.")
    torch.manual_seed(0)
    return arms[arm].model.build().eval().requires_grad_(False)


# %% [markdown]
# ## GAug, from one head and one query
#
# Take one layer of LocAt. Its attention gets tokens, makes queries and keys, and compares them:
#
# $$
# \text{logits} = \frac{q\,k^\top}{\sqrt d}, \qquad A = \operatorname{softmax}(\text{logits}), \qquad d = D / H .
# $$
#
# No place occurs in this formula. GAug adds a matrix $S$ to the logits that holds nothing but places, and lets the query
# decide how.


# %%
def inputs(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's attention is given, normalised: [B,T,D] each."""
    kept = model(x, capture=True)[1]
    last = len(model.blocks) - 1
    names = ["embed", *(f"block{i}.out" for i in range(last))]
    return [
        block.norm1(kept[name])
        for name, block in zip(names, model.blocks, strict=True)
    ]  # fmt: skip


model, layer, head = specimen("LocAt"), depth // 2, 0
attention = model.blocks[layer].attn
q, k, v = attention.project(inputs(model, x[:1])[layer])  # [1, H, T, d] each
d = q.shape[-1]
logits = (q @ k.mT)[0, head] / sqrt(d)  # [T, T]; CLS is token 0

# %% [markdown]
# **A width and a strength for every query.** Two small linear layers, shared by the heads of a layer, read the query of
# each patch $p$:
#
# $$
# \Sigma_p = M \operatorname{sigmoid}\bigl(W^\sigma q_p + b^\sigma - \ln (M-1)\bigr), \qquad
# \alpha_p = \operatorname{softplus}\bigl(W^\alpha q_p + b^\alpha\bigr) .
# $$
#
# $\Sigma_p$ has two entries, a variance across rows and one across columns, both between 0 and
# $M = \max(\text{rows}, \text{columns})^2$; so $\sigma = \sqrt\Sigma$ lies between nothing and the side of the grid. The shift by $\ln(M-1)$ puts a query of zeros at
# $\Sigma = 1$, one patch.

# %%
gaug = attention.gaug
patches = q[0, head, 1:]  # [N, d]: the patches' queries
M = max(grid) ** 2
z = patches @ gaug.log_var.weight.T + gaug.log_var.bias  # [N, 2]
Sigma = M * torch.sigmoid(z - log(M - 1))
z = patches @ gaug.log_alpha.weight.T + gaug.log_alpha.bias  # [N, 1]
alpha = F.softplus(z)
print(sum(p.numel() for p in gaug.parameters()), "= 3d + 3 parameters")

# %% [markdown]
# (The released weights are called `log_var` and `log_alpha`, and so are ours, though no logarithm is meant.)
#
# **A bump around the query.** With $u_p$ the place of patch $p$, in whole patches,
#
# $$
# S_{pt} = \alpha_p \exp\Bigl(-\frac12 \sum_{m \in \{\text{row}, \text{column}\}}
# \frac{(u_{t,m} - u_{p,m})^2}{\Sigma_{p,m} + \varepsilon}\Bigr), \qquad \varepsilon = 0.1,
# $$
#
# and $S = 0$ in the row and in the column of CLS, which has no place. Then $A = \operatorname{softmax}(\text{logits} +
# S)$, and that is all.

# %%
r, c = torch.arange(rows).float(), torch.arange(cols).float()
u = torch.cartesian_prod(r, c)  # [N, 2]: row and column of each patch
offsets = (u[:, None] - u[None]).square()  # [N, N, 2], query first
S = torch.zeros(T, T)
width = Sigma + gaug.epsilon
S[1:, 1:] = alpha * torch.exp(-0.5 * (offsets / width[:, None]).sum(-1))

assert torch.allclose(S, gaug(q)[0, head], atol=1e-6)  # the book's own module
seen = model(x[:1], capture=True)[1][f"block{layer}.attn"][0, head]
assert torch.allclose((logits + S).softmax(-1), seen, atol=1e-6)
assert (S >= 0).all() and (alpha >= S[1:, 1:]).all()
assert not S[0].any() and not S[:, 0].any()  # CLS
assert torch.equal(S.diagonal()[1:], alpha[:, 0])  # to itself, all of α

# %% [markdown]
# What the bump does to a head depends on what the head would have done without it. Below is one query of a *plain* ViT, in
# that head of the same layer which gives CLS most, and a bump laid on by hand: $\sigma$ of the rows says how far it reaches up and down, $\sigma$ of the columns how
# far to the sides. Each map is scaled to its own maximum. The sliders work on the page as it is.

# %% tags=["hide-input"]
from base64 import b64encode
from io import BytesIO

import ipywidgets as widgets
from matplotlib.image import imsave

here = (rows // 2 - 1) * cols + cols // 2 - 1  # the query, a patch near the centre
plain = specimen("ViT")
q_plain, k_plain, _ = plain.blocks[layer].attn.project(inputs(plain, x[:1])[layer])
rows_of = (q_plain @ k_plain.mT)[0, :, 1 + here] / sqrt(d)  # [H, T], the query's row in each head
content = rows_of[rows_of.softmax(-1)[:, 0].argmax()]  # [T], of the head that gives CLS most
box = f"left:{100 * (here % cols) / cols}%;top:{100 * (here // cols) / rows}%;width:{100 / cols}%;height:{100 / rows}%"
box = f"position:absolute;box-sizing:border-box;border:2px solid white;outline:1px solid black;{box}"


def tile(values: torch.Tensor, title: str, text: str) -> str:
    """A map over the patches as HTML, a pixel a patch, blown up by the browser; the query is framed."""
    top = max(values.max().item(), 1e-9)
    imsave(buffer := BytesIO(), values.view(grid).numpy(), vmin=0, vmax=top, cmap="inferno", format="png")
    style = "image-rendering:pixelated;width:160px;height:160px;display:block"
    source = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
    picture = f'<img style="{style}" src="{source}" alt="{title}"><span style="{box}"></span>'
    frame = f'<div style="position:relative;width:160px">{picture}</div>'
    return f'<div style="margin-right:1em"><b>{title}</b>{frame}{text}</div>'


# %% tags=["hide-input"]
distance = patch_distances(grid)[here]  # in patches


def read(row: torch.Tensor, title: str) -> str:
    """One row of attention [T] as a map, with its masses and its distance."""
    own, near = row[1 + here], (row[1:] * touching[here]).sum()
    far = (row[1:] * distance).sum() / row[1:].sum()
    masses = f"itself {own:.2g}, 8 neighbours {near:.2g}<br>CLS {row[0]:.2g}; distance {far:.1f} patches"
    return tile(row[1:], title, masses)


def setting(sigma_rows: float, sigma_cols: float, strength: float) -> widgets.HTML:
    """The bump and the softmax after it."""
    width = torch.tensor([sigma_rows, sigma_cols]) ** 2 + gaug.epsilon
    bump = strength * torch.exp(-0.5 * (offsets[here] / width).sum(-1))
    after = (content + F.pad(bump, (1, 0))).softmax(-1)
    shown = tile(bump, "S", f"from 0 to {strength:g}<br>&nbsp;") + read(after, "softmax after")
    return widgets.HTML(f'<div style="display:flex;flex-wrap:wrap">{shown}</div>')


# %% tags=["hide-input"]
knobs = {"σ, rows": (0.5, 1, 2, 4, bound), "σ, columns": (0.5, 1, 2, 4, bound), "α": (0, 0.69, 2, 4, 8)}
first = {"σ, rows": 1, "σ, columns": 1, "α": 2}
sliders = {
    name: widgets.SelectionSlider(options=[f"{v:g}" for v in values], index=first[name], description=name)
    for name, values in knobs.items()
}


def stacked(chosen: tuple[float, ...]) -> widgets.Widget:
    """The picture of a setting; while a knob is open, a stack over its values that the slider turns over."""
    if len(chosen) == len(knobs):
        return setting(*chosen)
    name = list(knobs)[len(chosen)]
    stack = widgets.Stack([stacked((*chosen, v)) for v in knobs[name]], selected_index=first[name])
    widgets.jslink((sliders[name], "index"), (stack, "selected_index"))
    return stack


start = widgets.HTML(read(content.softmax(-1), "softmax before"))
maps = widgets.HBox([start, stacked(())], layout={"flex_flow": "row wrap"})
widgets.VBox([widgets.HBox(list(sliders.values()), layout={"flex_flow": "row wrap"}), maps])

# %% [markdown]
# What to try:
#
# - α = 0 gives the head back as it was. α = 0.69, which is $\ln 2$, is where training starts: the query's own weight is
#   doubled against CLS, no more. LocAt starts as a **nudge**.
# - Widen both σ to the side of the grid, the most that is allowed, and turn α up. The widest bump is **not** the absence
#   of a bump: every patch gains, CLS does not, and at α = 8 it has lost all but a thousandth of its share or so. Only α = 0
#   gives plain attention.
# - σ of the rows at 0.5 and of the columns at 4 looks along a row. Two variances can do that, one cannot.
#
# ### A bump, not a penalty
#
# One might expect the logarithm of a Gaussian here, $-\Delta^2/2\sigma^2$, which multiplies attention by a Gaussian and
# forbids what is far. LocAt adds the Gaussian itself. In the softmax it multiplies a key's weight, measured against that
# of CLS, by $e^{S}$: by $e^{\alpha}$ at most, at the query, and by **one** far away. Nothing is hidden. What is far has
# to shout louder, by α at most, and can.

# %% mystnb={"figure": {"caption": "What is added to the logit of a key \u0394 patches away, and by what that multiplies its weight (against CLS), for \u03c3 = 1. The bumps end at 0 and at a factor of 1; the dashed logarithm of a Gaussian has no end.", "name": "fig-locat-bump"}, "image": {"alt": "Two panels over the distance in patches: Gaussian bumps that fall to zero, and the factors they stand for, beside a parabola that falls without end."}} tags=["hide-input"]
steps = np.linspace(0, 5, 101)
figure = new_figure(2.8)
left, right = figure.subplots(1, 2)
for strength, label in ((log(2), "α = ln 2, the start"), (2, "α = 2"), (4, "α = 4")):
    bump = strength * np.exp(-0.5 * steps**2 / (1 + 0.1))
    left.plot(steps, bump, label=label)
    right.plot(steps, np.exp(bump), label=label)
left.plot(steps, -0.5 * steps**2, "--", color="#6F6F6F", label="ln of a Gaussian")
right.plot(steps, np.exp(-0.5 * steps**2), "--", color="#6F6F6F", label="ln of a Gaussian")
left.set(xlabel="Δ (patches)", ylabel="added to the logit", ylim=(-5, 5))
right.set(xlabel="Δ (patches)", ylabel="factor on the weight", yscale="log", ylim=(1e-3, 100))
right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
figure

# %%
from vitbook.models.locat import GaussianBias

begin = GaussianBias(d, (14, 14))  # a fresh layer, the source's grid
var, strength = begin.predict(torch.zeros(1, 1, 197, d))  # queries of zeros
assert torch.allclose(var, torch.tensor(1.0))
assert torch.allclose(strength, torch.tensor(2.0).log())
steps = torch.arange(5)
bump = log(2) * torch.exp(-0.5 * steps**2 / (1 + begin.epsilon))
print("S at Δ = 0, 1, 2, 3, 4:", *(f"{b:.4f}" for b in bump))

# %% [markdown]
# ### Cheap, if you let it be
#
# The exponential of a sum is a product, so the bump is a row of factors times a column of factors, and
# $N(\text{rows}+\text{columns})$ exponentials do for $N^2$. On the source's 14 × 14 grid that is 5,488 in place of
# 38,416 a head. This is how the book's `GaussianBias` computes it, the exponentials in single precision whatever the rest runs in, their
# product in training in that of the logits. (It also
# knows what the source does on a grid other than that of training, where widths grow with the shorter side and offsets are
# capped; nothing on this page goes there.)

# %%
from_rows = torch.exp(-0.5 * (u[:, :1] - r) ** 2 / width[:, :1])  # [N, rows]
from_cols = torch.exp(-0.5 * (u[:, 1:] - c) ** 2 / width[:, 1:])  # [N, columns]
product = alpha[..., None] * from_rows[:, :, None] * from_cols[:, None, :]
assert (product.flatten(1) - S[1:, 1:]).abs().max() < 1e-6 * alpha.max().clamp(min=1)
print(f"{N * (rows + cols):,} exponentials in place of {N * N:,}")

# %% [markdown]
# ### Where a bump has little to say
#
# The source adds GAug to other backbones, too. It gained less in Swin, whose heads look within windows of 7 × 7, and
# nothing in GCViT, which the authors put down to narrow windows (as published, GCViT's have 7 and 14 patches a side, so
# that cannot be all). How much less is there to gain in a window? Mean distance, in patches, of a head that knows
# nothing but the bump (σ = 1), in a window of each side:

# %% tags=["hide-input"]
near = {}
for side in (3, 7, 14):  # narrower than any of these, Swin's, the source's whole grid
    apart = patch_distances((side, side))
    rows_of = {a: (a * torch.exp(-0.5 * apart**2 / (1 + gaug.epsilon))).softmax(-1) for a in (0, 2, 6)}
    near[f"{side} × {side}"] = {f"α = {a}": (A * apart).sum(-1).mean().item() for a, A in rows_of.items()}
tidy(pd.DataFrame(near).T.rename_axis("window"))

# %% [markdown]
# Without any bump a window of 3 × 3 is already nearer than the whole grid under a strong one.
#
# ## PRR: who is read is taught
#
# The other part has no parameters at all. After the final norm, in each head $h$, with its slice $x^{(h)}$ of the tokens
# (CLS too), the tokens attend to each other,
#
# $$
# x^{(h)+} = \operatorname{softmax}\Bigl(\frac{x^{(h)} x^{(h)\top}}{\sqrt d}\Bigr)\, x^{(h)} ,
# $$
#
# without projections, without shortcut, and the head reads CLS of what comes out.

# %%
from vitbook.models.attention import refine

last = model(x, capture=True)[1][f"block{depth - 1}.out"]
tokens = model.norm(last)  # [B, T, D]
slices = tokens.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, T, d]
mixing = (slices @ slices.mT / sqrt(d)).softmax(-1)  # [B, H, T, T]
refined = (mixing @ slices).transpose(1, 2).flatten(2)
assert torch.allclose(refined, refine(tokens, heads), atol=1e-5)
print(f"CLS keeps {mixing[:, :, 0, 0].mean():.2f} of its weight for itself")

# %% [markdown]
# How much is mixed depends on the width of a head, and here our small scale is *not* like the source's. For tokens of
# pure noise, normalised as the final norm does, the weight that a token keeps:


# %% tags=["hide-input"]
def keeps(width: int, count: int, tokens: int) -> float:
    """Mean weight of a white token on itself under PRR."""
    noise = torch.randn(8, tokens, width * count, generator=torch.Generator().manual_seed(0))
    part = F.layer_norm(noise, (width * count,)).unflatten(-1, (count, -1)).transpose(1, 2)
    return (part @ part.mT / sqrt(width)).softmax(-1).diagonal(dim1=-2, dim2=-1).mean().item()


sizes = {
    "this page": (d, heads, T),
    "its wide heads": (2 * d, heads // 2, T),
    "source C, ViT Tiny": (64, 3, 197),
    "source C, ViT Base": (64, 12, 197),
}
pd.Series({f"{name}, d = {size[0]}": keeps(*size) for name, size in sizes.items()}, name="kept").round(2).to_frame()

# %% [markdown]
# At the source's width PRR is a mild touch; with heads as narrow as ours it is a strong average. Keep that in mind when
# its gain is read below. Two models with half as many heads, hence twice as wide ones, stand beside it.
#
# Mixing is not the point anyway. The point is the way back. With the head on CLS alone, the last block's patches get
# **no gradient at all**, and so neither does the last block's GAug, which moves nothing but patches: its row of CLS is
# zero. The source says that its two parts can be attached independently. That is true, but GAug alone has one dead
# layer. A batch through fresh models, one backward pass:


# %%
def reached(**fields) -> dict[str, float]:
    """Norms of the loss's gradient in a fresh ViT with GAug."""
    torch.manual_seed(0)
    net = replace(config, attention="gaug", **fields).build()
    logits, kept = net(x, capture=True)
    out = kept[f"block{depth - 1}.out"]
    out.retain_grad()
    F.cross_entropy(logits, images.labels).backward()
    told = out.grad[:, net.prefix :]  # [B, N, D]
    found = {"patches that leave the last block": told.norm().item()}
    for name, block in {"last block": -1, "one before": -2}.items():
        weights = net.blocks[block].attn.gaug.parameters()
        found[f"GAug of the {name}"] = sum(w.grad.norm() for w in weights).item()
    alike = pair_similarity(told, 0).mean().item() if told.any() else np.nan
    return found | {"cosine of two patches' gradients": alike}


routes = {"+GAug": reached(), "LocAt": reached(refine=True)}
routes["+GAug, mean pool"] = reached(pool="mean", cls_token=False)
assert routes["+GAug"]["GAug of the last block"] == 0.0  # not small: zero
assert routes["LocAt"]["GAug of the last block"] > 0
pd.DataFrame(routes).map("{:.3g}".format).replace("nan", "–")

# %% [markdown]
# A mean over patches reaches them as well, but tells every patch **the same**: the cosine of any two patches' gradients
# is one (here, where as in timm the norm comes after the mean). Under PRR each patch gets a message of its own, by how it
# relates to CLS. That is how we read the source's "distinct contributions".
#
# Zero gradient leaves a trace in finished models. Biases start at zero and are not decayed, so those of a layer that
# never got a gradient are still exactly zero after all of training:

# %% tags=["hide-input"]
moved = {}
for arm in ("+GAug", "LocAt"):
    if (arm, 0) in done:
        biases = [[p for p in block.attn.gaug.parameters() if p.ndim == 1] for block in specimen(arm).blocks]
        moved[arm] = {f"block {i}": torch.cat(b).abs().max().item() for i, b in enumerate(biases)}
if "+GAug" in moved:
    assert moved["+GAug"][f"block {depth - 1}"] == 0.0
tidy(pd.DataFrame(moved).rename_axis("largest |bias| of GAug"), 3) if moved else missing

# %% [markdown]
# A warning for all that follows. Measures of heads are taken on patch queries, and measures of tokens on patches. In the
# last layer of *ViT* and *+GAug* no loss has ever read what patch queries fetch there, so the last point of these two
# models is a by-product; in *+PRR* and *LocAt* it is trained. Read the point before it as well.
#
# ## What each part is worth

# %% tags=["hide-input"]
probed = 200 if scale.name == "smoke" else 1_000  # test images, as for the heads in every record


def kept(key: tuple[str, int], measure: str, compute) -> pd.DataFrame | None:
    """A measure of a recorded model on test images, remembered; None where it is not recorded."""
    if key not in done:
        return None
    run, record = done[key], records[done[key]]

    def rows() -> dict:
        data = load(run.data, "test", limit=probed)
        table = compute(record.model().requires_grad_(False), data.normalise(data.images))
        return {"rows": table_to_json(table), "provenance": machine("cpu")}

    spec = {"run": run.id, "measure": measure, "images": probed, "version": 1}
    result = remember(spec, rows, make=(fresh or recording()) and record.weights is not None)
    return pd.DataFrame(result["rows"]).astype(float).astype({"layer": int}) if result else None


# %% tags=["hide-input"]
@torch.no_grad()
def bumps(model: torch.nn.Module, x: torch.Tensor) -> pd.DataFrame:
    """σ of rows and columns and α of every head, over images and patches: means, quantiles, share near the bounds."""
    seen = {}
    for batch in x.split(100):
        for layer, (block, y) in enumerate(zip(model.blocks, inputs(model, batch), strict=True)):
            var, alpha = block.attn.gaug.predict(block.attn.project(y)[0], x=y)  # [B, H, rows, columns, 2 and 1]
            seen.setdefault(layer, []).append(torch.cat([var.sqrt(), alpha], -1).flatten(2, 3))
    table = []
    for layer, found in seen.items():
        for head, values in enumerate(torch.cat(found).transpose(0, 1).flatten(1, 2).numpy()):  # [images · N, 3]
            sigma = values[:, :2] / bound
            row = {"layer": layer, "head": head, "inside": ((sigma > 0) & (sigma < 1)).mean()}
            row |= {"low": (sigma < 0.05).mean(), "high": (sigma > 0.95).mean()}
            for name, column in zip(("rows", "columns", "alpha"), values.T, strict=True):
                row |= {name: column.mean(), f"{name} 5": np.quantile(column, 0.05)}
                row |= {f"{name} 95": np.quantile(column, 0.95)}
            table.append(row)
    return pd.DataFrame(table)


# %% tags=["hide-input"]
@torch.no_grad()
def without_bump(model: torch.nn.Module, x: torch.Tensor) -> pd.DataFrame:
    """Heads as `measure_heads` has them, of the maps that q and k alone would make in a trained model."""

    def maps(batch: torch.Tensor, capture: bool):
        found = {}
        for i, (block, y) in enumerate(zip(model.blocks, inputs(model, batch), strict=True)):
            q, k, _ = block.attn.project(y)
            found[f"block{i}.attn"] = (q @ k.mT / sqrt(q.shape[-1])).softmax(-1)
        return batch[:, 0, 0, :1], found  # measure_heads counts images by the logits

    return measure_heads(maps, x, grid=model.grid, prefix=model.prefix, unit="max")


# %% tags=["hide-input"]
tokens_of = {key: kept(key, "tokens", measure_tokens) for key in runs if key[0] in main}
bumps_of = {key: kept(key, "bumps", bumps) for key in runs if key[0] in ("+GAug", "LocAt", "LocAt, no positions")}
content_of = {key: kept(key, "heads without bump", without_bump) for key in runs if key[0] in ("+GAug", "LocAt")}
tokens_of, bumps_of, content_of = (
    {key: table for key, table in found.items() if table is not None} for found in (tokens_of, bumps_of, content_of)
)


# %% tags=["hide-input"]
def heads_row(table: pd.DataFrame) -> dict[str, float]:
    """A table of heads, distances in parts of the largest, as one row."""
    far = table.distance
    row = {"all heads": far.mean(), "nearest head": far.min(), "farther than uniform": (far > 1.01 * uniform).sum()}
    return row | {name: table[name].mean() for name in ("entropy", "self", "cls", "neighbours")}


def quantities(key: tuple[str, int]) -> dict[str, float]:
    """What this chapter asks of one run."""
    record = records[done[key]]
    row = {"accuracy": 100 * record.accuracy, "clean loss": record.measures[-1]["clean_loss"]}
    row |= heads_row(record.heads(unit="max"))
    if (table := tokens_of.get(key)) is not None:
        row |= {f"{name}, last": table[name].iloc[-1] for name in ("locality", "cls", "pairs")}
        row |= {"cls, rise": table.cls.iloc[-1] - table.cls.iloc[0], "cls, before": table.cls.iloc[-2]}
        row |= {"locality over pairs, last": table.locality.iloc[-1] - table.pairs.iloc[-1]}
    if (table := bumps_of.get(key)) is not None:
        row |= {"near bounds": (table.low + table.high).mean(), "inside": table.inside.min()}
    return row


# %% tags=["hide-input"]
index = pd.MultiIndex.from_tuples(list(done), names=["arm", "seed"])
results = pd.DataFrame([quantities(key) for key in done], dtype=float).set_axis(index)


def of(arm: str, measure: str) -> pd.Series:
    """One value a seed; empty when nothing is recorded."""
    there = measure in results and arm in index.get_level_values("arm")
    return results.loc[arm, measure].dropna() if there else pd.Series(dtype=float)


# %% [markdown]
# Every arm starts from the same seeds and sees the same images in the same order (not from the same weights: a bias draws
# its own from the same stream). Differences are taken seed by seed, from the plain ViT; the column beside them is half of
# their 95 % interval, by the spread over seeds pooled over all arms.


# %% tags=["hide-input"]
def against(arm: str, base: str, measure: str = "accuracy") -> pd.Series:
    """Differences within a seed, of the seeds that both have."""
    return (of(arm, measure) - of(base, measure)).dropna()


def scatter(measure: str) -> tuple[float, int] | None:
    """The spread over seeds of one run, pooled over the arms, and its degrees of freedom."""
    groups = [group for group in (of(arm, measure) for arm in arms) if len(group) > 1]
    return pooled_spread(groups) if groups else None


def margin(arm: str, base: str, measure: str = "accuracy") -> float:
    """Half of the 95 % interval of the mean difference of two arms."""
    n, spread = len(against(arm, base, measure)), scatter(measure)
    return half_interval(spread, n, n) if spread and n and arm != base else np.nan


# %% tags=["hide-input"]
imagenet = {"+GAug": "+0.77", "+PRR": "+1.32", "LocAt": "+1.55", "mean pool": "+0.11"}
imagenet |= {"ViT, no positions": "−3.03", "LocAt, no positions": "+0.71"}


def worth(listed: tuple[str, ...], base: str) -> pd.DataFrame:
    """A row an arm: seeds, accuracy, the difference from another arm, the loss on clean training images."""
    rows = {
        arm: {
            "n": len(of(arm, "accuracy")), "accuracy (%)": of(arm, "accuracy").mean(),
            f"− {base} (points)": against(arm, base).mean(), "± (95 %)": margin(arm, base),
            "clean training loss": of(arm, "clean loss").mean(),
        }
        for arm in listed
    }  # fmt: skip
    return pd.DataFrame(rows).T.astype({"n": "Int64"})


# %% tags=["hide-input"]
table = worth(main, "ViT")
table.insert(4, "source C, ImageNet-1K †", pd.Series(imagenet))
tidy(table) if done else missing

# %% [markdown]
# † Points above its ViT Tiny, known to us only from another's reading notes; mean pool there is "GAP", and whether that
# has a CLS is not said. For CIFAR-100 the source tells one thing, +4 to +7 points for LocAt.
# An older note by the same reader has +0.82 for GAug and +0.56 for PRR, which turns their order round.
#
# The clean training loss, on 2,000 training images without augmentation and with hard labels, tells whether an arm is
# more accurate because it has learned more of its images, or because it has learned something else.
#
# And PRR where heads are twice as wide, so that it averages less:

# %% tags=["hide-input"]
tidy(worth(wide, wide[0])) if len(of(wide[0], "accuracy")) else missing

# %% mystnb={"figure": {"caption": "Test accuracy on the way; lines are means over seeds, bands reach from seed to seed. Do the arms separate early, when everything moves, or late?", "name": "fig-locat-accuracy"}, "image": {"alt": "Test accuracy over epochs for the plain ViT, with GAug, with PRR, with both, and with a mean over patches."}} tags=["hide-input"]
courses = {arm: [] for arm in main}
for (arm, _), run in done.items():
    if arm in courses:
        rows_of = [{"epoch": row["epoch"], "accuracy": 100 * row["accuracy"]} for row in records[run].measures]
        courses[arm].append(pd.DataFrame(rows_of))
courses = {arm: tables for arm, tables in courses.items() if tables}
training_curves(courses, "accuracy", label="test accuracy (%)") if courses else missing

# %% [markdown]
# ## Without positions
#
# A ViT without position embeddings does not know an image from the same patches in any other order. With GAug it does:
# $S$ holds places, though only differences of places. A LocAt without positions knows who is next to whom, but not
# where the picture begins, except by what is missing beyond its border. Patches shuffled, the same for all images:

# %%
shuffled = grid_shuffle(x, patch).double()  # one permutation of the patches
for arm in ("ViT, no positions", "LocAt, no positions"):
    net = specimen(arm).double()
    change = (net(shuffled) - net(x.double())).abs().max().item()
    print(f"{arm}: logits change by {change:.2g} at most")
    assert (change < 1e-9) == (arm == "ViT, no positions")

# %% tags=["hide-input"]
table = worth(("ViT", "ViT, no positions", "LocAt", "LocAt, no positions"), "ViT")
table.insert(4, "source C, ImageNet-1K †", pd.Series(imagenet))
tidy(table) if done else missing

# %% [markdown]
# The source's claim is *LocAt, no positions* against *ViT*: without positions it beats a ViT that has them.
#
# ## Taking the Gaussian apart
#
# The released code has none of the source's ablations, and the part of the paper with their formulas could not be read.
# What follows is **our reading** of their names:
#
# | variant | what differs | the source finds |
# | - | - | - |
# | no scale | $\alpha_p = 1$ | consistently worse |
# | fixed width | $\Sigma_p = 1$, where the learned one starts | clearly worse |
# | isotropic | one variance for rows and columns | about equal |
# | auto-α | $\alpha_p$ is the root mean square of $q_p$, the size of its own logits | close |
# | Laplace | $S = \alpha \exp\bigl(-\sum_m \lvert\Delta_m\rvert / \sigma_m\bigr)$ | better than ViT |
# | inverse distance | $S = \alpha \,/\, \bigl(1 + \sum_m \lvert\Delta_m\rvert / \sigma_m\bigr)$ | better than ViT |
# | Σ from input | the variances are read from the layer's input, for all heads alike | better, more parameters |

# %% tags=["hide-input"]
added = {}
for name, shape in {"added here": config, "added to ViT Tiny": paper.model}.items():
    base = sum(p.numel() for p in shape.build().parameters())
    for arm, flavour in ({"LocAt": "gaug"} | variants).items():
        count = sum(p.numel() for p in replace(shape, attention=flavour).build().parameters())
        added.setdefault(arm, {})[name] = f"{count - base:,}"
assert added["LocAt"]["added to ViT Tiny"] == "2,340"  # as the source prints
table = worth(("LocAt", *variants, "ViT"), "LocAt").join(pd.DataFrame(added).T)
tidy(table)

# %% [markdown]
# All these rows stand against the *same* LocAts: if one of them was lucky, all look worse at once. A difference smaller
# than its ± is not told from chance, and what the source calls "about equal" or "close" may well be smaller than that.
#
# ## What the bumps have become
#
# Widths and strengths on test images, layer by layer. The source reports that the learned σ stay inside their interval
# and do not crowd at its ends. The first half is no finding: a sigmoid cannot leave its interval. Nor is the second by
# itself: every σ starts at 1, far from both ends, and would be there still if nothing had been learned.


# %% tags=["hide-input"]
def by_layer(axes, tables: dict[str, list[pd.DataFrame]], column: str) -> None:
    """Layer means of a column: a line an arm, a band from seed to seed."""
    for name, found in tables.items():
        means = pd.DataFrame([table.groupby("layer")[column].mean() for table in found])
        (line,) = axes.plot(means.columns, means.mean(), marker="o", label=name)
        axes.fill_between(means.columns, means.min(), means.max(), color=line.get_color(), alpha=0.18, linewidth=0)
    axes.set(xlabel="layer", xticks=range(depth))


def grouped(found: dict[tuple[str, int], pd.DataFrame]) -> dict[str, list[pd.DataFrame]]:
    """Tables of runs by arm."""
    names = dict.fromkeys(arm for arm, _ in found)
    return {name: [table for (arm, _), table in found.items() if arm == name] for name in names}


# %% mystnb={"figure": {"caption": "Means of \u03c3 along rows, \u03c3 along columns and \u03b1 over heads, patches and test images; grey, for LocAt's seed 0, what the middle 90 % of queries span in the mean of the heads. Dashed, where training starts; \u03c3 cannot leave the frame of its panel. In which layers have queries asked for a wide look, and where for a strong pull? In +GAug the last layer has had no gradient.", "name": "fig-locat-sigma"}, "image": {"alt": "Three panels over the layers: the learned standard deviations along rows and columns, and the strength alpha, for GAug alone, LocAt, and LocAt without positions."}} tags=["hide-input"]
figure = new_figure(2.8)
panels = figure.subplots(1, 3)
labels = {"rows": "σ, rows (patches)", "columns": "σ, columns (patches)", "alpha": "α"}
for axes, (name, label), begin in zip(panels, labels.items(), (1, 1, log(2)), strict=True):
    by_layer(axes, grouped(bumps_of), name)
    if ("LocAt", 0) in bumps_of:
        ends = bumps_of["LocAt", 0].groupby("layer")[[f"{name} 5", f"{name} 95"]].mean()
        axes.fill_between(ends.index, *ends.T.to_numpy(), color="#6F6F6F", alpha=0.15, linewidth=0)
    axes.axhline(begin, color="#6F6F6F", linestyle=(0, (4, 3)), linewidth=1, zorder=0)
    axes.set(ylabel=label, ylim=(0, None if name == "alpha" else bound))
if bumps_of:
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
figure if bumps_of else missing

# %% [markdown]
# How many queries sit at the ends, σ below 5 % or above 95 % of the largest? Spread evenly over the interval, it would
# be 10 % together.

# %% tags=["hide-input"]
ends = {
    (arm, seed, name): table.groupby("layer")[column].mean()
    for (arm, seed), table in bumps_of.items()
    for name, column in (("σ < 5 %", "low"), ("σ > 95 %", "high"))
}
tidy(100 * pd.DataFrame(ends).T.rename_axis(["arm", "seed", "share (%)"]), 1) if ends else missing

# %% [markdown]
# ## Where heads look now
#
# Measured as in chapter 02, on maps with the bump in them, for those are what mixes the values. To tell the bump from
# what the head itself has learned, the heads of +GAug and LocAt are measured once more on the maps that
# $q k^\top/\sqrt d$ alone would make, in the same trained model and on the same tokens. If GAug takes care of the
# neighbourhood, queries and keys are free for something else, and should look *farther* than those of the same model
# without it: +GAug than ViT, LocAt than +PRR. If not, the two pulls add up. And since the bump is there from the first step, an untrained LocAt stands in the table too: what it has, nobody has learned.

# %% tags=["hide-input"]
summary = {arm: results.loc[arm].mean() for arm in main if len(of(arm, "accuracy"))}
if ("LocAt", 0) in done:
    summary["LocAt, untrained"] = pd.Series(heads_row(records[done["LocAt", 0]].heads(0, "max")))
left_out = {
    f"{arm}, S left out": pd.DataFrame([heads_row(table) for table in tables]).mean()
    for arm, tables in grouped(content_of).items()
}
even = {"all heads": uniform, "nearest head": uniform, "farther than uniform": 0, "entropy": log(T)}
even |= {"self": 1 / T, "cls": 1 / T, "neighbours": touching.sum(1).mean().item() / T}
table = pd.DataFrame(summary | left_out).T.reindex(columns=list(even))
table.loc["looking everywhere"] = pd.Series(even)
tidy(table, 3) if done else missing

# %% [markdown]
# Means over seeds and over the heads of all layers. Distances in parts of the largest, entropy in nats; the third column
# counts the heads of a model that look farther than a uniform one by 1 % or more.


# %% tags=["hide-input"]
def reading(arm: str, base: str) -> str:
    """Whether queries and keys look farther beside a bump than without one, in two arms that differ in the bump alone."""
    own = {seed: heads_row(table)["all heads"] for (name, seed), table in content_of.items() if name == arm}
    gap = (pd.Series(own, dtype=float) - of(base, "all heads")).dropna()
    if gap.empty or not scatter("all heads"):
        return f"{arm} against {base}: not enough is recorded yet."
    groups = [[heads_row(table)["all heads"] for table in tables] for tables in grouped(content_of).values()]
    groups += [of(arm, "all heads") for arm in ("ViT", "+PRR")]
    half = half_interval(pooled_spread(groups), len(gap), len(gap))
    word = "farther than" if gap.mean() > half else "nearer than" if gap.mean() < -half else "not measurably off"
    return (
        f"Left to themselves, the queries and keys of {arm} look **{word}** those of {base}: by {gap.mean():+.3f} ± "
        f"{half:.3f} of the largest distance (95 %, n = {len(gap)})."
    )


Markdown("\n\n".join(reading(*pair) for pair in (("+GAug", "ViT"), ("LocAt", "+PRR"))))

# %% mystnb={"figure": {"caption": "Layer means of the distance. Does GAug bring every layer nearer, or some? And without their bumps, do +GAug and LocAt lie above ViT and +PRR or below?", "name": "fig-locat-distance"}, "image": {"alt": "Mean attention distance by layer for the plain ViT, GAug, PRR, LocAt and LocAt with the bump left out of its maps."}} tags=["hide-input"]
profiles = {arm: [records[run].heads(unit="max") for (name, _), run in done.items() if name == arm] for arm in main}
profiles |= {f"{arm}, S left out": tables for arm, tables in grouped(content_of).items()}
profiles = {name: tables for name, tables in profiles.items() if tables}
layer_profile(profiles, uniform=uniform, label="distance / largest") if profiles else missing

# %% mystnb={"figure": {"caption": "Layer means of the weight on the eight neighbours, from the same maps; dashed, a head that looks everywhere alike.", "name": "fig-locat-neighbours"}, "image": {"alt": "Weight on the eight neighbours by layer, for the same models."}} tags=["hide-input"]
layer_profile(profiles, "neighbours", uniform=even["neighbours"]) if profiles else missing

# %% [markdown]
# Heads of one layer differ, so look at them one by one. Plain ViT and LocAt, seed 0, on the same images: choose a layer
# and a head, and move the query. Compare a layer in the middle (of the plain ViT's last one, no loss has read the patches), and try CLS as the query,
# whose row has no bump.

# %% tags=["hide-input"]
from vitbook.show import Explorer


def explorer() -> Explorer:
    """Every map of both models on six test images."""
    maps = {}
    for arm in ("ViT", "LocAt"):
        found = specimen(arm)(x, capture=True)[1]
        maps[arm] = torch.stack([found[f"block{i}.attn"] for i in range(depth)], 1).numpy()  # [n, L, H, T, T]
    pixels = images.images.permute(0, 2, 3, 1).numpy()
    return Explorer.of(pixels, maps, grid, labels=[images.classes[i] for i in images.labels], layer=0, head=0)


explorer() if {("ViT", 0), ("LocAt", 0)} <= set(done) else missing

# %% [markdown]
# ## Patches against CLS
#
# Do patches turn into CLS? Tokens are compared as each block leaves them, by the cosine of their angle: a patch with its
# neighbours in the 3 × 3 window (*locality*, the source's score, our reading of it), a patch with CLS, and any two
# patches of an image. The third is needed to read the first: where all tokens are one, every patch resembles its
# neighbours perfectly. Local structure is what locality has **above** the mean of all pairs. Beside the trained models
# stands the plain ViT as it was drawn, from three seeds, for some of this is there before anything is learned.

# %% tags=["hide-input"]
untrained = []
few = load_or_shapes(arms["ViT"].data, "test", limit=100)
for seed in range(3):
    torch.manual_seed(seed)
    drawn = arms["ViT"].model.build().eval()
    with torch.no_grad():
        untrained.append(measure_tokens(drawn, few.normalise(few.images)))
rise = [table.cls.iloc[-1] - table.cls.iloc[0] for table in untrained]
print("cosine with CLS, last block − first, untrained:", *(f"{value:+.3f}" for value in rise))

# %% mystnb={"figure": {"caption": "Cosines by layer: with the 8 neighbours, with CLS, and of all pairs of patches. Collapse would be three curves that climb to 1 together; kept local structure is a left curve that stays above the right one.", "name": "fig-locat-tokens"}, "image": {"alt": "Three panels over the layers: similarity of a patch with its neighbours, with CLS, and with all patches, for five models and the untrained ViT."}} tags=["hide-input"]
figure = new_figure(2.8)
panels = figure.subplots(1, 3, sharey=True)
titles = {"locality": "8 neighbours", "cls": "CLS", "pairs": "all pairs"}
with_untrained = grouped(tokens_of) | {"ViT, untrained": untrained}
for axes, (name, title) in zip(panels, titles.items(), strict=True):
    by_layer(axes, with_untrained, name)
    axes.set_title(title)
panels[0].set_ylabel("mean cosine of a patch with")
if tokens_of:
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
figure if tokens_of else missing

# %% [markdown]
# (A mean-pooled model has no CLS, and no line in the middle.) That patches come closer to CLS from the first block to
# the last is thus no sign of training; how close they come may be. What a head may do with such patches, on images it was
# never asked to segment, is chapter 06.
#
# ## What became of the claims
#
# Thresholds were taken from the source before any of these runs. Pairs are compared within a seed, and the interval is
# Student's; its spread is that over seeds, pooled over the arms that have several, times $\sqrt 2$ for a difference, or
# that of the differences themselves where it has more degrees of freedom. "About equal" needs a margin: two points, half
# of the smallest gain that the source reports on CIFAR-100. An equality within two points can only be shown if the ± of
# its row above is smaller than that.

# %% tags=["hide-input"]
from pathlib import Path

from vitbook.show import claim_cards, judge, load_claims

pairs = {
    "accuracy": ("LocAt", "ViT"), "accuracy-size": ("LocAt", "ViT"),
    "gaug-helps": ("+GAug", "ViT"), "prr-helps": ("+PRR", "ViT"),
    "both-over-gaug": ("LocAt", "+GAug"), "both-over-prr": ("LocAt", "+PRR"),
    "prr-over-mean-pool": ("+PRR", "mean pool"),
    "no-positions": ("LocAt, no positions", "ViT"),
    "fixed-width-worse": ("fixed width", "LocAt"), "no-scale-worse": ("no scale", "LocAt"),
    "isotropic-alike": ("isotropic", "LocAt"), "auto-scale-alike": ("auto-α", "LocAt"),
    "laplace-helps": ("Laplace", "ViT"), "inverse-helps": ("inverse distance", "ViT"),
    "from-input-better": ("Σ from input", "LocAt"),
}  # fmt: skip
tested = {name: (against(*pair), "accuracy", pair) for name, pair in pairs.items()}
tested["sigma-off-bounds"] = of("LocAt", "near bounds"), "near bounds", ("LocAt",)
tested["vit-becomes-cls"] = of("ViT", "cls, rise"), "cls, rise", ("ViT",)
for name, measure in {"less-like-cls": "cls, last", "less-like-cls-before": "cls, before"}.items():
    tested[name] = against("LocAt", "ViT", measure), measure, ("LocAt", "ViT")
tested["heads-local"] = against("LocAt", "ViT", "neighbours"), "neighbours", ("LocAt", "ViT")
for name, measure in {"keeps-locality": "locality, last", "keeps-apart": "locality over pairs, last"}.items():
    tested[name] = against("LocAt", "ViT", measure), measure, ("LocAt", "ViT")

# %% tags=["hide-input"]
claims = load_claims(Path("../book/claims.yml"))
verdicts = []
for name, (values, measure, used) in tested.items():
    if len(values):
        spread = scatter(measure)  # of one run; that of a difference is √2 times as large
        lent = spread and (sqrt(len(used)) * spread[0], spread[1])
        how = {"records": [runs[arm, seed].id for arm in used for seed in values.index], "profile": scale.name}
        verdicts.append(judge(claims[f"locat.{name}"], values, pooled_sd=lent, **how))
if len(inside := of("LocAt", "inside")):
    how = {"records": [runs["LocAt", seed].id for seed in inside.index], "profile": scale.name}
    verdicts.append(judge(claims["locat.sigma-inside"], inside.min(), exact=True, **how))
if waiting := 1 + len(tested) - len(verdicts):
    print(f"{waiting} of {1 + len(tested)} claims wait for their recordings.")

# %% tags=["hide-input"]
claim_cards(claims, verdicts) if verdicts else missing


# %% tags=["hide-input"]
def answered() -> str:
    """The sentence at the top of the page, made from the records."""
    name = {"cifar100": "CIFAR-100"}.get(arms["ViT"].data, f"`{arms['ViT'].data}`")
    gain = {
        arm: f"{against(arm, 'ViT').mean():+.1f} ± {margin(arm, 'ViT'):.1f} (n = {len(against(arm, 'ViT'))})"
        for arm in ("LocAt", "+GAug", "+PRR")
    }
    near = {arm: of(arm, "neighbours").mean() for arm in ("ViT", "LocAt")}
    like = {arm: of(arm, "cls, last").mean() for arm in ("ViT", "LocAt")}
    return (
        f"**On {name}, in a ViT of {depth} layers × {config.dim}, LocAt changes test accuracy by {gain['LocAt']} "
        f"points, GAug alone by {gain['+GAug']} and PRR alone by {gain['+PRR']}, at 95 %. The weight of its heads on neighbours goes from {near['ViT']:.2f} to "
        f"{near['LocAt']:.2f}, and the cosine of a last-layer patch with CLS from {like['ViT']:.2f} to "
        f"{like['LocAt']:.2f}.**"
    )


kinds = {kind: sum(v.verdict == kind for v in verdicts) for kind in dict.fromkeys(v.verdict for v in verdicts)}
tally = "; ".join(f"*{kind}* {count}" for kind, count in kinds.items())
ready = all(len(against(arm, "ViT")) for arm in ("LocAt", "+GAug", "+PRR")) and len(of("LocAt", "cls, last"))
waiting = f"**The recordings are still being made: {len(done)} of {len(runs)} runs are there.**"
answer.update(Markdown((answered() if ready else waiting) + (f"\n\nClaims: {tally}." if verdicts else "")))

# %% [markdown]
# ## Limits
#
# One data set, one recipe, one small architecture. Two things of it are unlike the source's. Heads are 16 wide in place
# of 64, and PRR mixes by their width: what is called +PRR here averages far more than the source's does. And the grid
# has 8 × 8 places in place of 14 × 14: σ reaches to 8 patches, and there is less that is far. CutMix is in the recipe
# throughout, and chapter 04 asks whether CutMix itself makes heads local; what GAug adds to a recipe without it is not
# asked here.
#
# With the bump left out, a trained LocAt is a model that never was: its queries and keys have learned beside the bump.
# The measure tells what they do, not what they would have become without it. A cosine says nothing of length, and
# patches that differ from CLS need not be good for anything; chapter 06 asks that.
#
# Twenty-three claims are judged at 95 % each, seven of them against the same plain ViTs' accuracy and seven against the
# same LocAts': a lucky seed of either moves many verdicts at once, and one going the wrong way by chance is no surprise.
# The intervals are over seeds; that another ten thousand test images would move an accuracy by about half a point is not
# in them.
#
# What source C leaves unsaid, or where it could not be read: the recipe, sizes and absolute accuracies on CIFAR-100;
# seeds and spread of any number; the formulas of all ablations; borders and averaging order of the locality score; and
# that the last layer's GAug learns nothing without PRR, which is our finding.
#
# ## Exercise
#
# *Whom does the loss reach?* On 5,000 images for 20 epochs, train +GAug and LocAt. **Predict first:** in which layers
# has GAug's bias moved, in each? Which of the two is more accurate, and by how much would two seeds of one of them
# differ? Then set `try_it = True`: two small models side by side, some six minutes on two cores. The check asks
# whether the gradient went where this page says. And the harder question: give +GAug a mean over patches in place of
# CLS. Its last layer then learns too. Is there still something for PRR to do?

# %%
try_it = False
if try_it:
    brief = {"limit": 5_000, "recipe.epochs": 20, "recipe.warmup": 2}
    trial = {}
    for arm in ("+GAug", "LocAt"):
        trial[arm] = changed(desk.scale(changed(paper, parts[arm])), brief)
    trained, size = obtain_many(trial.values()), {}
    for arm, run in trial.items():
        net = trained[run].model().requires_grad_(False)
        layers = [block.attn.gaug for block in net.blocks]
        size[arm] = [g.log_var.bias.abs().max().item() for g in layers]
        print(arm, f"{trained[run].accuracy:.1%}", np.round(size[arm], 3))
    # The check.
    assert size["+GAug"][-1] == 0.0, "nothing reads the last layer's patches"
    assert min(size["+GAug"][:-1]) > 0, "everywhere else the loss arrives"
    assert min(size["LocAt"]) > 0, "with PRR, in every layer"
    q = net.blocks[0].attn.project(inputs(net, x)[0])[0]
    S, (_, alpha) = layers[0](q), layers[0].predict(q)
    assert torch.allclose(S[..., 1:, 1:].amax(-1), alpha.flatten(2))  # peaks
    print("Sound.")

# %% [markdown]
# ## References
#
# The method and the claims: {cite:t}`hajimiri2026locat`. CLS or a mean over patches, and what becomes of places:
# {cite:t}`raghu2021see`. Registers, another answer to tokens that stop describing their place:
# {cite:t}`darcet2024registers`. The recipe: {cite:t}`cubuk2019autoaugment`, {cite:t}`yun2019cutmix`,
# {cite:t}`szegedy2016inception`, {cite:t}`loshchilov2019adamw`.

# %% tags=["remove-input"]
from vitbook.show import provenance_line

provenance_line([record.provenance for record in records.values()], scale.name)
