# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is a Vision Transformer?
#
# **In one sentence:** a Vision Transformer cuts an image into patches, turns each into a vector, and lets all vectors
# look at one another, layer after layer; the whole of it is some thirty lines of arithmetic on 2,400,586 numbers, and
# not one of those lines knows which patches are neighbours.
#
# | question | What happens between pixels and logits, and where could a sense of *near* and *far* come in? |
# | - | - |
# | **claim under test** | none. This chapter builds the instrument; it asserts equalities, and prints each |
# | **built** | source A's model {cite}`santiago2026cutmix`, 8 × 192, 8 heads, after {cite}`dosovitskiy2021image` |
# | **compared with** | this book's `ViT` and timm's `VisionTransformer` {cite}`wightman2019timm`, weights alike |
# | **trained** | nothing, but for the exercise at the end (CIFAR-10, two small models) |
# | **verdict** | no card; every equality holds up to rounding, or this page would not have been built |
#
# | profile | images | time on a CPU |
# | - | - | - |
# | `smoke` | made-up `shapes` | seconds |
# | `desk` (this page), `paper` | CIFAR-10 {cite}`krizhevsky2009cifar` | under a minute, the exercise some minutes |
#
# You need matrix products, softmax and PyTorch at reading level. Symbols are listed in the [glossary](../glossary.md).

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

# %% tags=["parameters"]
profile: str = "desk"
train: bool = False  # True: train what is not recorded (here: nothing)

# %% tags=["hide-input"]
import copy
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import timm
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitbook.data import load_or_shapes
from vitbook.measures.heads import measure_heads, neighbours, patch_distances
from vitbook.models.vit import ViTConfig, from_timm
from vitbook.runs import choose
from vitbook.show import heads_by_layer, house_style

house_style()
scale = choose(profile)  # refuses a profile that does not exist
pd.options.display.precision = 3

# %% [markdown]
# ## Two models, and one image
#
# Both models of this chapter are stated here, at their sources' own scale, as far as it is known; neither is trained,
# so no profile makes them smaller. The first, source A's, we build by hand. The second has source B's layers and heads
# {cite}`smallvit`; its width and its MLP's ratio, which B does not give, are our choice. It returns at the end, when we
# ask where an untrained model looks.

# %%
p, C, r = 4, 10, 2  # side of a patch, classes, MLP ratio: the same in both
L, D, H = 8, 192, 8  # layers, width, heads of source A
model_a = ViTConfig(patch=p, depth=L, dim=D, heads=H, mlp_ratio=r, classes=C)
model_b = ViTConfig(patch=p, depth=7, dim=384, heads=6, mlp_ratio=r, classes=C)

h, w = model_a.grid  # rows and columns of patches
N, T, d = h * w, h * w + 1, D // H
print(f"N = {N} patches of {p} × {p} pixels, T = {T} tokens, heads of width d = {d}")

# %%
name, number = ("shapes", 32) if profile == "smoke" else ("cifar10", 128)
photos = load_or_shapes(name, "test", limit=number)
photo = photos.images[17]  # uint8 [3,32,32]
x = photos.normalise(photo[None])  # [B,3,32,32] with B = 1
print(f"{photos.name}: {photos.classes[photos.labels[17]]}")
print(f"pixels {photo.min()} to {photo.max()}")
print(f"mean 0 and deviation 1 over the set: {x.min():.2f} to {x.max():.2f}")

# %% [markdown]
# ## Patches
#
# A Vision Transformer does not see pixels. It sees a *set of patches*: squares of $p \times p$ pixels that do not
# overlap. With $p = 4$ an image of 32 × 32 pixels falls into $h \times w = 8 \times 8$, hence $N = 64$ of them, each
# with $3 p^2 = 48$ numbers. Cutting is a matter of reshaping; no number changes.


# %%
def cut(images, p):
    """Images [B,3,h·p,w·p] → patches [B,N,3·p·p], row by row.

    Inside a patch: channel, then row, then column.
    """
    B, channels, rows, cols = images.shape
    images = images.reshape(B, channels, rows // p, p, cols // p, p)
    return images.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, channels * p * p)


patches = cut(x, p)
print("images", list(x.shape), "→ patches", list(patches.shape))

# %% mystnb={"figure": {"caption": "From an image to a set. Left: the image. Middle: the same pixels, cut into an 8 \u00d7 8 grid of patches; this is how *we* go on drawing them. Right: what the model is given, a list of 64 patches. That the ninth stands below the first is nowhere in it.", "name": "fig-patches"}, "image": {"alt": "One small image three times: whole, with white gaps between its 64 patches, and as four long rows of sixteen separate patches."}} tags=["hide-input"]
tiles = cut(photo[None], p).reshape(N, 3, p, p).permute(0, 2, 3, 1)


def lay_out(tiles, cols, gap=1):
    """Tiles [n,p,p,3] side by side with white gaps, `cols` a row."""
    rows, step = len(tiles) // cols, p + gap
    sheet = np.full((rows * step - gap, cols * step - gap, 3), 251, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // cols * step, i % cols * step
        sheet[top : top + p, left : left + p] = tile
    return sheet


figure, axes = plt.subplots(1, 3, width_ratios=[1, 1.2, 2.6], figsize=(7.2, 2.0), layout="constrained")
axes[0].imshow(photo.permute(1, 2, 0))
axes[1].imshow(lay_out(tiles, w))
axes[2].imshow(lay_out(tiles, 16, gap=2))
for ax, title in zip(axes, ["image", f"{h} × {w} patches", f"the list, 0 to {N - 1}"], strict=True):
    ax.set_title(title)
    ax.axis("off")
plt.show()

# %% [markdown]
# ## Tokens
#
# Every patch is turned into a *token*, a vector of width $D$, by the same matrix $E$ and offset $b$: patch $i$ with
# pixels $u_i \in \mathbb R^{3p^2}$ becomes
#
# $$z_i = E\,u_i + b, \qquad E \in \mathbb R^{D \times 3p^2}.$$
#
# We keep the weights of our model in a plain dictionary, `weights`, and add to it as we go. Its names are timm's: later
# that alone will let us carry them into two other programs. Matrices are drawn from a normal distribution with
# deviation 0.02 and offsets start at zero, as is usual. A matrix and its offset always come as a pair, so one function
# applies them all; a second says how far two results are apart.

# %%
dice = torch.Generator().manual_seed(0)


def draw(*shape):
    return 0.02 * torch.randn(shape, generator=dice)


def linear(z, weights, name):
    """z [...,in] → [...,out]; a weight [out,3,p,p] is read as [out,3·p·p]."""
    return z @ weights[f"{name}.weight"].flatten(1).T + weights[f"{name}.bias"]


def gap(one, other):
    """The largest difference between two results, in any entry."""
    return (one - other).abs().max().item()


# %%
weights = {"patch_embed.proj.weight": draw(D, 3, p, p)}
weights["patch_embed.proj.bias"] = torch.zeros(D)
tokens = linear(patches, weights, "patch_embed.proj")  # [B,N,D]

E, b = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
convolved = F.conv2d(x, E, b, stride=p).flatten(2).transpose(1, 2)
print("tokens", list(tokens.shape))
print(f"largest difference from a convolution: {gap(tokens, convolved):.1e}")
assert gap(tokens, convolved) < 1e-4 * tokens.abs().max()

# %% [markdown]
# That number shows what the weight's shape suggests: this step is often written as a convolution with kernel and
# stride $p$. It is the only place in the model where pixels that lie close together are treated together, and its reach
# ends at the patch's edge.
#
# ## CLS, and positions
#
# Two things are learned per model, not per image.
#
# - **CLS** is one more token, put in front. It stands for no patch. The classifier will read it and nothing else, so
#   whatever the model finds out about the image has to be collected there.
# - **Positions**: a table with one vector for each of the $T = N + 1$ places, added to the tokens. Without it, as we
#   shall see, the model could not tell an image from the same image with its patches shuffled.

# %%
weights |= {"cls_token": draw(1, 1, D), "pos_embed": draw(1, T, D)}


def embed(images, weights, p):
    """Normalised images [B,3,h·p,w·p] → tokens with positions [B,T,D]."""
    tokens = linear(cut(images, p), weights, "patch_embed.proj")
    cls = weights["cls_token"].expand(len(images), -1, -1)
    return torch.cat([cls, tokens], 1) + weights["pos_embed"]


z = embed(x, weights, p)
print("tokens with positions", list(z.shape))

# %% [markdown]
# Is that table a map, with similar vectors for places that are close? Not at the start: it is a draw of the dice.
# Compare the vectors of patches that touch with all others by the cosine of their angle.

# %%
place = F.normalize(weights["pos_embed"][0, 1:], dim=-1)
cosine, touch = place @ place.T, neighbours((h, w))
apart = ~touch & ~torch.eye(N, dtype=torch.bool)
for name, pairs in {"patches that touch": touch, "all other pairs": apart}.items():
    chosen = cosine[pairs]
    print(f"{name:>18}: mean cosine {chosen.mean():+.3f} ± {chosen.std():.3f}")
print(f"{'chance alone':>18}: mean cosine +0.000 ± {D**-0.5:.3f}")

# %% [markdown]
# ## One head, by hand
#
# Attention is how tokens exchange what they hold {cite}`vaswani2017attention`. First every token is put on a common
# scale (*layer norm*: subtract its mean, divide by its deviation, then a learned gain and offset per channel). Then
# each token makes three shorter vectors of width $d = D/H$, by three learned matrices ($q_i = W_q z_i + b_q$ for the
# normalised token $z_i$, and so on): a **query** $q_i$, what it asks for; a **key** $k_j$, what it can be found by; a
# **value** $v_j$, what it has to give. A head compares each query with each key and turns the
# scores of one query into weights that sum to one:
#
# $$A_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt d)}{\sum_{m} \exp(q_i \cdot k_m / \sqrt d)}, \qquad
# y_i = \sum_j A_{ij}\, v_j .$$
#
# Row $i$ of $A$ is *where token $i$ looks*. This $T \times T$ table is the object of the whole book.


# %%
def layer_norm(z, gain, offset):
    centred = z - z.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + 1e-6).sqrt() * gain + offset


qkv = draw(3 * D, D)  # one matrix: all queries, then all keys, then all values
normed_tokens = layer_norm(z[0], torch.ones(D), torch.zeros(D))  # [T,D], our one image

q = normed_tokens @ qkv[:d].T  # [T,d]: the queries of head 0
k = normed_tokens @ qkv[D : D + d].T
v = normed_tokens @ qkv[2 * D : 2 * D + d].T
scores = q @ k.T / d**0.5  # [T,T]
A = scores.exp() / scores.exp().sum(-1, keepdim=True)
y = A @ v  # [T,d]

print(f"A {list(A.shape)}: rows sum to {A.sum(-1).min():.6f} … {A.sum(-1).max():.6f}")
print(f"its {T * T:,} weights lie between {A.min():.4f} and {A.max():.4f}")
print(f"a head that looks everywhere alike has 1/{T} = {1 / T:.4f}")

# %% mystnb={"figure": {"caption": "One untrained head and one query. Left: the image, the query's patch framed. Middle: the query's weights on the 64 patches, brightest where largest; it seems to have found something, for even random queries and keys respond to colour. Right: the same weights and that on CLS, sorted, on a scale that starts at zero: almost flat. A map stretched over its own range always looks like a find: read its scale first.", "name": "fig-one-head"}, "image": {"alt": "An image with one framed patch; a speckled 8 by 8 map of attention weights with a colour bar; 65 sorted bars of nearly equal height along a dashed line at one sixty-fifth."}} tags=["hide-input"]
row, col = 2, 5
look = A[1 + row * w + col]  # [T]: token 0 is CLS, patch (row, col) is token 1 + row · w + col
figure, axes = plt.subplots(1, 3, width_ratios=[1, 1.25, 1.7], figsize=(7.2, 2.1), layout="constrained")
axes[0].imshow(photo.permute(1, 2, 0))
axes[0].add_patch(plt.Rectangle((col * p - 0.5, row * p - 0.5), p, p, fill=False, edgecolor="white", linewidth=2))
axes[0].set_title(f"query: patch ({row}, {col})")
shown = axes[1].imshow(look[1:].reshape(h, w))
axes[1].set_title("its weights on the patches")
figure.colorbar(shown, ax=axes[1], shrink=0.85).outline.set_visible(False)
axes[2].bar(range(T), look.sort(descending=True).values, width=0.8)
axes[2].axhline(1 / T, color="0.4", linestyle="--", linewidth=1, label=f"everywhere alike, 1/{T}")
axes[2].set(title="the same weights, sorted", xlabel="rank of the key", ylim=(0, 0.025))
axes[2].legend(loc="upper right")
for ax in axes[:2]:
    ax.axis("off")
plt.show()

# %% [markdown]
# Why so flat? The closed form is short. A normed token has length $\sqrt D$; a random matrix with deviation $\sigma$
# gives each entry of $q$ and $k$ the deviation $\sigma\sqrt D$; so the score $q \cdot k/\sqrt d$ has deviation
# $\sigma^2 D$, whatever $d$ is. For $\sigma = 0.02$ and $D = 192$ that is 0.077, and $e^{\pm 0.077}$ is one, give or
# take eight per cent. So every weight stays near $1/T$, in any head and for any image.

# %%
print(f"closed form σ²D = {0.02**2 * D:.3f}")
print(f"root mean square of the scores: {scores.square().mean().sqrt():.3f}")
print(f"their spread within a row: {scores.std(-1).mean():.3f}")

# %% [markdown]
# ## Many heads
#
# One head makes one pattern of looking. A layer has $H$ of them side by side, each with its own slice of the matrix,
# each free to look elsewhere. Their outputs are put end to end, $H \cdot d = D$ numbers again, and mixed by one more
# matrix. Reshaping does all heads in one product.


# %%
def attention(z, weights, name, H):
    """Tokens [B,T,D] → gathered [B,T,D], and where the heads looked [B,H,T,T]."""
    B, T, D = z.shape
    d = D // H
    qkv = linear(z, weights, f"{name}.qkv")  # [B,T,3D]
    q, k, v = qkv.reshape(B, T, 3, H, d).permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
    A = (q @ k.transpose(-2, -1) / d**0.5).softmax(-1)
    y = (A @ v).transpose(1, 2).reshape(B, T, D)
    return linear(y, weights, f"{name}.proj"), A


name = "blocks.0.attn"
weights |= {f"{name}.qkv.weight": qkv, f"{name}.qkv.bias": torch.zeros(3 * D)}
weights |= {f"{name}.proj.weight": draw(D, D), f"{name}.proj.bias": torch.zeros(D)}

_, maps = attention(normed_tokens[None], weights, name, H)
print(f"maps {list(maps.shape)}; head 0 against ours by hand: {gap(maps[0, 0], A):.1e}")
assert gap(maps[0, 0], A) < 1e-4 * A.max()

# %% [markdown]
# ## A block
#
# A block lets tokens talk, then think. *Talk* is attention, where tokens mix. *Think* is an MLP of two layers with a
# GELU between, hidden width $rD$, applied to each token alone. Both are *added* to the token, so that a block corrects
# what is there rather than replacing it:
#
# $$z \leftarrow z + \operatorname{Attention}(\operatorname{LN}(z)), \qquad
# z \leftarrow z + \operatorname{MLP}(\operatorname{LN}(z)).$$


# %%
def block(z, weights, name, H):
    """Tokens [B,T,D] → tokens [B,T,D]."""
    normed_tokens = normed(z, weights, f"{name}.norm1")
    z = z + attention(normed_tokens, weights, f"{name}.attn", H)[0]
    normed_tokens = normed(z, weights, f"{name}.norm2")
    hidden = linear(normed_tokens, weights, f"{name}.mlp.fc1")
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))  # GELU
    return z + linear(hidden, weights, f"{name}.mlp.fc2")


def normed(z, weights, name):
    return layer_norm(z, weights[f"{name}.weight"], weights[f"{name}.bias"])


# %% [markdown]
# ## The whole model
#
# $L$ blocks, a last layer norm, and a linear map from CLS to one *logit* for each class. That is all there is.


# %%
def vit(images, weights, p, L, H):
    """Normalised images [B,3,h·p,w·p] → logits [B,C]."""
    return read(run_blocks(embed(images, weights, p), weights, L, H), weights)


def run_blocks(z, weights, L, H):
    for i in range(L):
        z = block(z, weights, f"blocks.{i}", H)
    return z


def read(z, weights):
    """Only token 0, CLS, is read."""
    return linear(normed(z, weights, "norm")[:, 0], weights, "head")


# %% [markdown]
# The dictionary still lacks most of its weights. Each line below is a kind of weight and its shape.

# %%
shapes = {"head": (C, D)}
for i in range(L):
    shapes[f"blocks.{i}.attn.qkv"] = (3 * D, D)
    shapes[f"blocks.{i}.attn.proj"] = (D, D)
    shapes[f"blocks.{i}.mlp.fc1"] = (r * D, D)
    shapes[f"blocks.{i}.mlp.fc2"] = (D, r * D)
for name, shape in shapes.items():
    weights.setdefault(f"{name}.weight", draw(*shape))  # keeps block 0's
    weights.setdefault(f"{name}.bias", torch.zeros(shape[0]))
for name in ["norm", *(f"blocks.{i}.norm{k}" for i in range(L) for k in (1, 2))]:
    weights |= {f"{name}.weight": torch.ones(D), f"{name}.bias": torch.zeros(D)}

logits = vit(x, weights, p, L, H)[0]
columns = {"logit": logits, "probability": logits.softmax(-1)}
pd.DataFrame(columns, index=list(photos.classes)).T

# %% [markdown]
# Pixels in, logits out. As nothing has been learned, all ten classes are about as likely, and the small differences
# mean nothing.
#
# ## The same, in `vitbook` and in timm
#
# Code that only agrees with itself proves little. So we carry the dictionary into the `ViT` that the rest of this book
# uses and into timm's `VisionTransformer`, which much of the world uses, and compare the logits of 32 images. A fresh
# model has offsets of zero and gains of one, and a forgotten offset would not show; therefore noise is added to every
# weight first. In the other direction timm draws the weights and we take them.

# %%
noisy = {}
for name, tensor in weights.items():
    noisy[name] = tensor + 0.05 * torch.randn(tensor.shape, generator=dice)

torch.manual_seed(0)
shape = {"patch_size": p, "embed_dim": D, "depth": L, "num_heads": H, "mlp_ratio": r}
drawn = timm.models.VisionTransformer(img_size=32, num_classes=C, **shape).eval()
timms, ours = copy.deepcopy(drawn), model_a.build().eval()
timms.load_state_dict(noisy)  # strict: a name too many or too few is an error
ours.load_state_dict(noisy)
images = photos.normalise(photos.images[:32])

# %%
with torch.no_grad():
    by_hand, by_timm = vit(images, noisy, p, L, H), drawn(images)
    gaps = {
        "by hand → vitbook": gap(ours(images), by_hand),
        "by hand → timm": gap(timms(images), by_hand),
        "timm → by hand": gap(vit(images, drawn.state_dict(), p, L, H), by_timm),
        "timm → vitbook": gap(from_timm(drawn)(images), by_timm),
    }
low, high = by_hand.min(), by_hand.max()
print(f"logits of {len(images)} images, from {low:.1f} to {high:.1f}")
for way, difference in gaps.items():
    print(f"{way:>18}: largest difference {difference:.1e}")
assert max(gaps.values()) < 1e-4

# %% [markdown]
# What is left is rounding: sums taken in another order. From here on we use `vitbook`'s, which also hands out its
# attention maps and whatever else lies on the way, by name: `logits, kept = model(images, capture=True)`.
#
# ## Counting the parameters
#
# All sizes are known, so the count has a formula; with biased linear layers, learned positions and CLS it is
#
# $$
# \begin{aligned}
# \text{parameters} = {}& \underbrace{(3p^2 + 1)D}_{\text{patches}} + \underbrace{D + TD}_{\text{CLS, positions}}
# + \underbrace{2D}_{\text{norm}} + \underbrace{(D + 1)C}_{\text{head}} \\
# & + L\,\big[\underbrace{4D^2 + 4D}_{\text{attention}} + \underbrace{2rD^2 + (r + 1)D}_{\text{MLP}}
# + \underbrace{4D}_{\text{norms}}\big] .
# \end{aligned}
# $$

# %%
formula = {
    "patch_embed": (3 * p * p + 1) * D,
    "cls_token": D,
    "pos_embed": T * D,
    "attn": L * (4 * D * D + 4 * D),
    "mlp": L * (2 * r * D * D + (r + 1) * D),
    "norm1, norm2": L * 4 * D,
    "norm": 2 * D,
    "head": (D + 1) * C,
}
counted = dict.fromkeys(formula, 0)
for name, parameter in ours.named_parameters():
    part = name.split(".")[2 if name.startswith("blocks") else 0]
    part = "norm1, norm2" if part in ("norm1", "norm2") else part
    counted[part] += parameter.numel()

total = sum(formula.values())
assert formula == counted and total == 2_400_586
table = pd.DataFrame({"formula": formula, "counted": counted}).map("{:,}".format)
table["share"] = [f"{number / total:.1%}" for number in counted.values()]
print(f"in all: {total:,} by formula, {sum(counted.values()):,} counted")
table

# %% [markdown]
# What we could read of the paper says "about 2.4 M" and nothing of the MLP's ratio. The formula settles it, for a
# standard block: among whole ratios only $r = 2$ gives that count ($r = 4$ would give 3.6 M). Nearly all weights sit in
# the blocks, and no block weight depends on $T$: all tokens share them. The table of positions, the only weights that
# are tied to a place, is half a per cent of it.
#
# ## Counting the work
#
# A product of an $a \times b$ with a $b \times c$ matrix takes $abc$ multiply-adds, two operations each. Per image:
#
# $$\text{FLOPs} = 2\,\Big[\,3p^2ND + L\big(\underbrace{(4 + 2r)\,T D^2}_{\text{linear in } T}
# + \underbrace{2\,T^2 D}_{q k^\top \text{ and } A v}\big) + DC\Big].$$

# %%
products = 2 * T**2 * D
per_block = (4 + 2 * r) * T * D**2 + products
by_formula = 2 * (3 * p**2 * N * D + L * per_block + D * C)
with FlopCounterMode(display=False) as counter, torch.no_grad():
    ours(x)
by_torch = counter.get_total_flops()
print(f"{by_formula:,} by formula, {model_a.flops():,} by ViTConfig.flops")
print(f"{by_torch:,} by PyTorch's own counter, while the model runs")
assert by_formula == model_a.flops() == by_torch
print(f"attention's products: {2 * L * products / by_formula:.1%} of all")
print(f"half of a block at T = (2 + r) D = {(2 + r) * D}")

# %% [markdown]
# So at 65 tokens attention's two products are a small part of the bill. They become the larger part of a block only
# beyond $T = (2 + r)D$ tokens. To see it, cut the same image ever finer: half the patch's side means twice the patches along each side.
# The next cell times two blocks of each such model on this very machine, once with attention written out as above and
# once with PyTorch's *fused* attention, which does the same sums without ever writing the $T \times T$ table down.


# %%
def milliseconds(model, batch, fused):
    """The best of three passes, per image."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(batch, fused=fused)
        times.append(time.perf_counter() - start)
    return 1000 * min(times) / len(batch)


sides = [16, (16, 8), 8, (8, 4), 4]
if profile != "smoke":
    sides += [(4, 2), 2, (2, 1), 1]
rows = []
with torch.no_grad():
    for side in sides:
        config = ViTConfig(patch=side, dim=D, depth=2, heads=H, classes=C)
        model, tokens = config.build().eval(), config.grid[0] * config.grid[1] + 1
        batch = torch.randn(max(1, 1500 // tokens), 3, 32, 32)
        row = {"T": tokens, "all": config.flops()}
        row["products"] = 2 * config.depth * 2 * tokens**2 * D
        row["explicit"] = milliseconds(model, batch, fused=False)
        row["fused"] = milliseconds(model, batch, fused=True)
        rows.append(row)
cost = pd.DataFrame(rows)

# %% mystnb={"figure": {"caption": "What tokens cost (two blocks, width 192, both axes logarithmic). Left: operations by formula. The part of the linear layers rises in step with the number of tokens, that of attention's products with its square; they cross at 768. Right: time per image, measured while this page was made; dashed, the time if it went with the operations, set equal at 65 tokens. Watch where the two measured curves part.", "name": "fig-cost"}, "image": {"alt": "Two log-log plots against the number of tokens. Left: operations of linear layers with slope one, of attention products with slope two, and their sum. Right: measured milliseconds per image for explicit and fused attention beside a dashed prediction."}} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.0), layout="constrained")
axes[0].plot(cost["T"], cost["all"] / 1e6, color="0.25", label="all")
axes[0].plot(cost["T"], (cost["all"] - cost.products) / 1e6, label="linear layers, ∝ T")
axes[0].plot(cost["T"], cost.products / 1e6, label=r"$qk^\top$ and $Av$, ∝ T²")
axes[0].axvline((2 + r) * D, color="0.6", linestyle=":", linewidth=1)
axes[0].set(title="operations", ylabel="MFLOP per image")
reference = cost[cost["T"] == T].iloc[0]
in_step = cost["all"] * reference.explicit / reference["all"]
axes[1].plot(cost["T"], in_step, "--", color="0.4", label="if it went with FLOPs")
axes[1].plot(cost["T"], cost.explicit, "o-", label="attention written out")
axes[1].plot(cost["T"], cost.fused, "s-", label="fused attention")
axes[1].set(title="time", ylabel="ms per image")
for ax in axes:
    ax.set(xscale="log", yscale="log", xlabel="tokens T")
    ax.set_xticks([5, 17, 65, 257, 1025], ["5", "17", "65", "257", "1,025"])
    ax.minorticks_off()
    ax.legend()
plt.show()

# %% [markdown]
# Fused attention does the same operations, so what the two curves differ by is traffic: the table of $T^2$ weights a
# head is written to memory, read by the softmax, written again, read again. How big it gets, and how far apart the two
# were while this page was made:

# %%
last, growth = cost.iloc[-1], cost.iloc[-1] / reference
table_size = H * last["T"] ** 2 * 4 / 2**20
print(f"from {T} to {last['T']:.0f} tokens: {growth['all']:.0f} times the operations,")
print(f"{growth.explicit:.0f} times the seconds written out, {growth.fused:.0f} times fused")
print(f"one layer's table, of one image, in float32: {table_size:.0f} MiB")

# %% [markdown]
# ## Nothing in it knows neighbours
#
# Now the question of the book. Go back through the code and look for a line in which the *order* of tokens matters, or
# in which one patch is nearer than another. There is none. Layer norm, MLP and the matrices act on each token alone.
# Attention compares every pair alike: if the tokens are shuffled, the rows and columns of $A$ are shuffled with them,
# and the sum $\sum_j A_{ij} v_j$ runs over the same terms in another order. For any permutation $\pi$ of the tokens
#
# $$\operatorname{blocks}(\pi z) = \pi \operatorname{blocks}(z),$$
#
# and CLS, which stays at its place, does not notice at all.

# %%
shuffle = torch.randperm(N, generator=dice)
order = torch.cat([torch.tensor([0]), 1 + shuffle])  # CLS stays in front

z = embed(images, noisy, p)
straight = run_blocks(z, noisy, L, H)
shuffled = run_blocks(z[:, order], noisy, L, H)
print(f"tokens after {L} blocks: from {straight.min():.1f} to {straight.max():.1f}")
print(f"blocks(π z) against π blocks(z): {gap(shuffled, straight[:, order]):.1e}")
print(f"what is read from CLS: {gap(read(shuffled, noisy), read(straight, noisy)):.1e}")
assert gap(shuffled, straight[:, order]) < 1e-4 * straight.abs().max()
assert gap(read(shuffled, noisy), read(straight, noisy)) < 1e-4 * by_hand.abs().max()

# %% [markdown]
# The only thing that ties a patch to its place is the vector that was added to it, and those vectors are rows of a
# table. Shuffle the patches of every image *and the rows of the table* in the same way, and the model computes the
# same thing. Shuffle the patches only, and it does not. And inside a patch? There too: shuffle the 48 numbers of
# every patch and the columns of $E$ alike. A convolution, by contrast, has nothing that could be shuffled along: a
# 3 × 3 kernel has neighbours built into its indices.


# %%
def paste(patches, p):
    """The inverse of `cut`: patches [B,N,3·p·p] → images [B,3,h·p,w·p]."""
    sheet = patches.reshape(-1, h, w, 3, p, p).permute(0, 3, 1, 4, 2, 5)
    return sheet.reshape(-1, 3, h * p, w * p)


inside = torch.randperm(3 * p * p, generator=dice)
moved = paste(cut(images, p)[:, shuffle], p)  # patches shuffled
stirred = paste(cut(images, p)[..., inside], p)  # inside each patch

E = noisy["patch_embed.proj.weight"].flatten(1)
places = noisy | {"pos_embed": noisy["pos_embed"][:, order]}
pixels = noisy | {"patch_embed.proj.weight": E[:, inside]}

# %%
kernel = torch.randn(C, 3, 3, 3, generator=dice)


def convolve(images):
    """A small convolutional network: 3 × 3 kernels, ReLU, mean over the plane."""
    return F.conv2d(images, kernel).relu().mean((2, 3))


changes = {
    "ViT: patches, and positions with them": gap(vit(moved, places, p, L, H), by_hand),
    "ViT: inside patches, and E with them": gap(vit(stirred, pixels, p, L, H), by_hand),
    "ViT: patches, positions left alone": gap(vit(moved, noisy, p, L, H), by_hand),
    "convolution: patches": gap(convolve(moved), convolve(images)),
}
for what, change in changes.items():
    print(f"{what:>38}: largest change {change:.1e}")
followed_1, followed_2, alone, _ = changes.values()
assert max(followed_1, followed_2) < 1e-4 < alone

# %% mystnb={"figure": {"caption": "Three images that are one to a fresh Vision Transformer: as it was, with its patches shuffled, with the pixels of all patches shuffled alike. For each there are weights, equally likely to be drawn at the start, that give exactly the same logits.", "name": "fig-shuffled"}, "image": {"alt": "A small image three times: intact, with its 64 patches in random order, and with the pixels inside each patch rearranged."}} tags=["hide-input"]
one = cut(photo[None], p)
views = {"image": photo[None], "patches shuffled": paste(one[:, shuffle], p)}
views["shuffled inside patches"] = paste(one[..., inside], p)
figure, axes = plt.subplots(1, 3, figsize=(6.2, 2.2), layout="constrained")
for ax, (title, view) in zip(axes, views.items(), strict=True):
    ax.imshow(view[0].permute(1, 2, 0))
    ax.set_title(title)
    ax.axis("off")
plt.show()

# %% [markdown]
# Does training bring the neighbours in? Not by itself. The *gradient* has the same symmetry: on shuffled images, the
# model with shuffled positions gets the same gradient for every weight, and for the positions the same rows, shuffled.
# So a step of gradient descent, or of Adam, which treats entries one by one, leaves the two models equal again, and so
# does the next. Whoever trains on images whose patches have all been shuffled in one and the same way trains the
# same model, with its positions renamed.

# %%
twin = copy.deepcopy(ours)
with torch.no_grad():
    twin.pos_embed.copy_(ours.pos_embed[:, order])
labels = photos.labels[:32]
F.cross_entropy(ours(images), labels).backward()
F.cross_entropy(twin(moved), labels).backward()

gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
gradients["pos_embed"] = gradients["pos_embed"][:, order]
apart = max(gap(twins.grad, gradients[name]) for name, twins in twin.named_parameters())
size = max(gradient.abs().max().item() for gradient in gradients.values())
print(f"{len(gradients)} gradients, up to {size:.1f}; largest difference {apart:.1e}")
assert apart < 1e-4 * size

# %% [markdown]
# Where, then, can a sense of *near* come from? From two places only.
#
# 1. **The images.** In photographs, patches that touch resemble each other and belong together; their statistics tell a
#    model which places are close, if it listens. That descent can find patches which carry the label together, near or
#    not, is what {cite:t}`jelassi2022spatial` show, in a world made for proofs (source D, chapter 07).
# 2. **The recipe.** Training images are rarely shown as they are. A random crop slides the picture by a few pixels
#    across the edges of patches; CutMix {cite}`yun2019cutmix` pastes *rectangles*. Both are defined on the plane, both
#    break the symmetry above, and so both can whisper about neighbours. {cite:t}`santiago2026cutmix` say that CutMix
#    does so loudly (source A, chapter 04).
#
# ## What an untrained model looks at
#
# With nothing known about neighbours, and scores near zero, heads should look everywhere alike. The book's first
# instrument says how far a head looks: the **mean attention distance**, the distance $\Delta_{ij}$ between the centres
# of patches $i$ and $j$, weighted by attention, averaged over queries and images. CLS has no place, so it is left out
# and the rest of the row is divided by its sum (the next chapter says what hangs on that). A head that looks
# everywhere alike would read the mean of all pairs, each patch with itself included. (The other columns are chapter
# 02's: entropy, and the weight on the patch itself, on CLS and on the neighbours.)

# %%
uniform = patch_distances((h, w), "px", p).mean().item()
torch.manual_seed(0)
every = photos.normalise(photos.images)
table = measure_heads(model_b.build(), every, unit="px", patch=p)
low, high = table.distance.min(), table.distance.max()
print(f"a head that looks everywhere alike: {uniform:.3f} px")
print(f"the {len(table)} untrained heads: {low:.2f} to {high:.2f} px ({len(every)} images)")
table.groupby("layer")[["distance", "entropy", "self", "cls", "neighbours"]].mean()

# %% mystnb={"figure": {"caption": "Where the 42 heads of an untrained 7 \u00d7 384 Vision Transformer look: one dot a head, in pixels. In every layer they lie on the line of a head that looks everywhere alike. Whatever later chapters find below this line has been learned.", "name": "fig-untrained"}, "image": {"alt": "Mean attention distance in pixels for six heads in each of seven layers; all dots lie on a dashed horizontal line at about sixteen and a half pixels."}} tags=["hide-input"]
figure = heads_by_layer(table, uniform=uniform, label="mean attention distance (px)")
figure.axes[0].set_ylim(0, 20)
figure

# %% [markdown]
# So this line, about 16.5 px, is our mark for *no preference*, and with it go an entropy just below $\ln 65 = 4.174$ and
# one part in 65 on each key. In later chapters the same picture is taken after training. Heads will have left this line, some far
# down, and the book asks which, when, why, and what for.
#
# ## Limits, and what the sources leave unsaid
#
# - What is shown here are equalities, for one shape and random weights. They do not depend on the draw; the sizes of
#   the rounding errors do.
# - The symmetry is one of *architecture and start*. It says that nothing forces a ViT to look locally, not that it
#   won't. It holds for learned positions drawn independently; fixed sine tables, relative positions and rotary
#   encodings do know the plane, and so do hybrids with convolutions.
# - Times are of this machine on that day, and a busy machine is slower. Their ratios are what to look at.
# - {cite:t}`santiago2026cutmix`, as far as we could read them, state depth, width, heads and "about 2.4 M" parameters;
#   CLS and learned positions are our reading. Source B states layers, heads, CLS and learned positions, but no width:
#   384 is our choice.
#
# ## Exercise: finer patches
#
# In the eight steps of {cite:t}`smallvit` (source B) the largest gain comes from a single digit: patches of
# 4 pixels instead of 8, from 61.6 % to 77.7 % on CIFAR-10. Same idea here, small: 10,000 images, 10 epochs, six layers
# of width 64.
#
# 1. **Predict the price.** By the formula above, how many times the operations does the model with patch 4 take? And
#    will it take as many times the seconds, or fewer? The right panel of {numref}`fig-cost` has a hint.
# 2. **Predict the gain** in percentage points of test accuracy: none, a few, or the source's sixteen?
# 3. Write your numbers down, set `run_exercise = True`, and run the cell and then the check. The two models train side
#    by side, in a few minutes on two idle cores. You may stop at any time: `obtain_many` goes on from the last epoch,
#    and never trains the same run twice.

# %%
run_exercise = False
my_price = 1.0  # your prediction: operations with patch 4 / operations with patch 8
my_gain = 0.0  # your prediction: points of accuracy

# %%
if run_exercise:
    from vitbook.runs import Recipe, Run, obtain_many

    coarse, fine = (
        Run(
            "cifar10",
            ViTConfig(patch=side, dim=64, depth=6, heads=4, classes=10),
            Recipe(epochs=10, batch=64, lr=3e-3, warmup=2),
            limit=10_000,
        )
        for side in (8, 4)
    )
    records = obtain_many([coarse, fine])

# %% [markdown]
# The check compares your predictions with the formula and with what was trained.

# %%
if run_exercise:
    price = fine.model.flops() / coarse.model.flops()
    took = {run: sum(records[run].curves["seconds"]) for run in (coarse, fine)}
    verdict = "right" if abs(my_price / price - 1) < 0.05 else "look again"
    print(f"operations: {price:.2f} times; you said {my_price:.2f}: {verdict}")
    ratio = took[fine] / took[coarse]
    print(f"seconds: {took[coarse]:.0f} and {took[fine]:.0f}, {ratio:.2f} times")
    low, high = records[coarse].accuracy, records[fine].accuracy
    points = 100 * (high - low)
    print(f"accuracy: {low:.1%} and {high:.1%}, {points:+.1f}; you said {my_gain:+.1f}")
    assert high > low, "finer patches did not help: how often, with other seeds?"

# %% [markdown]
# ## References
#
# All works cited are listed in the [bibliography](../bibliography.md); the symbols in the [glossary](../glossary.md).

# %% tags=["hide-input"]
print(f"Profile {profile}: no record is used, nothing is trained.")
print(f"Images: {photos.name} {photos.split}, fingerprint {photos.fingerprint[:12]}")
threads = torch.get_num_threads()
print(f"torch {torch.__version__}, timm {timm.__version__}, a CPU, {threads} thread(s)")
