"""Self-attention, its flavours side by side.

=================== ======================================================== ==========================
flavour             logits of a head, query i and key j                       where
=================== ======================================================== ==========================
``plain``           ``q_i · k_j / √d``                                        Vaswani 2017
``masked-diagonal`` the same, but a token may not look at itself (j = i: −∞)  SPT/LSA, chapter 04
``positional``      the same, q and k made of the positions alone             Jelassi 2022, chapter 08
``gaug``            ``q_i · k_j / √d + S_ij``, a learned bump around patch i  Hajimiri 2026, chapter 05
``gaug-…`` and two  S with a part taken out or changed (our readings)         :mod:`vitbook.models.gaussian`
=================== ======================================================== ==========================

A flavour is built as ``flavour(dim, heads, grid, prefix)`` and called as
``(x[B,T,D], capture, fused, positions[1,T,D]) -> (y[B,T,D], probabilities[B,H,T,T] or None)``. Its parameters carry
timm's names (``qkv``, ``proj``). Tokens are ``prefix`` without a place, then the patches of the grid row by row.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.models.gaussian import BIASES, GaussianBias, Grid


class Attention(nn.Module):
    """Multi-head self-attention, ``softmax(q kᵀ / √d) v`` for each head of width ``d = dim / heads``.

    ``grid`` (rows, columns) and ``prefix`` say where the tokens are, to the flavours that ask.
    """

    def __init__(self, dim: int, heads: int, grid: Grid | None = None, prefix: int = 1):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}; choose a multiple of the heads")
        self.heads, self.grid, self.prefix = heads, grid, prefix
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B,H,T,d] (or [1,H,T,d] where they are the same for every image)."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return q, k, v

    def bias(self, x: Tensor, q: Tensor) -> Tensor | None:
        """What is added to the logits, [T,T] or [B,H,T,T]; None for plain attention."""
        return None

    def biased(self, logits: Tensor, x: Tensor, q: Tensor) -> Tensor:
        """The logits with the bias; a flavour that can do so without making it says how."""
        bias = self.bias(x, q)
        return logits if bias is None else logits + bias

    def forward(
        self, x: Tensor, capture: bool = False, fused: bool | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``x`` [B,T,D] → output [B,T,D] and, with ``capture``, the probabilities [B,H,T,T] in float32.

        ``fused`` chooses PyTorch's fused kernel; by default it is used on CUDA, where it is faster, and not on a CPU,
        where the explicit product is (its bf16 backward takes a third of the time). Captured maps take the explicit
        path. ``positions`` [1,T,D]: the model's position embeddings, for the flavour that reads them.
        """
        B, T, D = x.shape
        q, k, v = self.project(x, positions)
        attn = None
        if fused is None:
            fused = x.is_cuda and not capture
        if fused:
            if capture:
                raise ValueError("fused=True keeps no attention maps; ask for capture=True without it")
            y = F.scaled_dot_product_attention(q.expand_as(v), k.expand_as(v), v, attn_mask=self.bias(x, q))
        else:
            logits = self.biased(q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1), x, q)
            attn = logits.float().softmax(-1) if capture else logits.softmax(-1)
            y = attn.to(v.dtype) @ v
        y = self.proj(y.transpose(1, 2).reshape(B, T, D))
        return y, (attn.expand(B, -1, -1, -1) if capture else None)


class MaskedDiagonal(Attention):
    """No token may look at itself: the diagonal of the logits is −∞ (CLS included)."""

    def bias(self, x: Tensor, q: Tensor) -> Tensor:
        T = x.shape[1]
        return torch.zeros(T, T, dtype=x.dtype, device=x.device).fill_diagonal_(float("-inf"))


class Positional(Attention):
    """Where to look is a matter of places alone: ``softmax((P W^q)(P W^k)ᵀ / √d) (x W^v)``, the same for every image.

    The source says that logits come from the position embeddings and values from the tokens, and not how each layer
    does so. **Our choices**: every layer reads the model's one table of positions (CLS and registers have theirs) with
    a W^q and W^k of its own; the table is first normalised as tokens are (mean 0, variance 1 over D; no gain or shift,
    which W^q and W^k would absorb); tokens carry their positions in, as in plain attention. So this flavour has the
    parameters of ``plain``, by name and shape.
    """

    def project(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if positions is None:
            raise ValueError("positional attention reads the position embeddings; give them as positions=, [1,T,D]")
        B, T, D = x.shape
        places = F.layer_norm(positions, (D,), eps=1e-6)
        weight, bias = self.qkv.weight, self.qkv.bias
        qk = F.linear(places, weight[: 2 * D], bias[: 2 * D]).reshape(1, T, 2, self.heads, D // self.heads)
        q, k = qk.permute(2, 0, 3, 1, 4)
        v = F.linear(x, weight[2 * D :], bias[2 * D :]).reshape(B, T, self.heads, D // self.heads).transpose(1, 2)
        return q, k, v


class GaussianAttention(Attention):
    """Attention with a bias of :mod:`vitbook.models.gaussian`, GAug of LocAt unless another is chosen.

    ``grid`` is that of training; where the tokens of a call are others, set the attribute ``grid``.
    """

    def __init__(self, dim: int, heads: int, grid: Grid, prefix: int = 1, bias: type[GaussianBias] = BIASES["gaug"]):
        super().__init__(dim, heads, grid, prefix)
        self.gaug = bias.for_layer(dim, heads, grid, prefix)  # the name of the released weights

    def bias(self, x: Tensor, q: Tensor) -> Tensor:
        return self.gaug(q, self.grid, x)

    def biased(self, logits: Tensor, x: Tensor, q: Tensor) -> Tensor:
        return self.gaug.add_to(logits, q, self.grid, x)


FLAVOURS = {
    "plain": Attention,
    "masked-diagonal": MaskedDiagonal,
    "positional": Positional,
    **{name: partial(GaussianAttention, bias=bias) for name, bias in BIASES.items()},
}


def refine(x: Tensor, heads: int) -> Tensor:
    """Patch representation refinement, PRR of LocAt: [B,T,C] → [B,T,C].

    Each head's slice attends to itself, ``x⁺ = softmax(x xᵀ / √d) x`` with d = C / heads: no weights, no residual, all
    tokens are queries and keys. It stands between the final norm and what the head reads, so that a loss on CLS alone
    reaches what every patch has become.
    """
    if x.ndim != 3 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"tokens of shape {tuple(x.shape)} do not split into heads={heads}; [B, T, C], C % heads = 0")
    wide = x.float() if x.dtype == torch.float16 else x  # squares of tokens can leave its range
    h = wide.unflatten(-1, (heads, -1)).transpose(1, 2)
    h = (h * h.shape[-1] ** -0.5 @ h.transpose(-2, -1)).softmax(-1) @ h
    return h.transpose(1, 2).flatten(2).to(x.dtype)
