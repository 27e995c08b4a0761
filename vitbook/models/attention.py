"""Self-attention, its flavours side by side.

=================== ======================================================== ==================
flavour             logits of a head, query i and key j                       where
=================== ======================================================== ==================
``plain``           ``q_i · k_j / √d``                                        Vaswani 2017
``masked-diagonal`` the same, but a token may not look at itself (j = i: −∞)  SPT/LSA, chapter 04
=================== ======================================================== ==================

A flavour is a class that is built as ``flavour(dim, heads)`` and called as
``(x[B,T,D]) -> (y[B,T,D], probabilities[B,H,T,T] or None)``. Its parameters carry timm's names (``qkv``, ``proj``).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention, ``softmax(q kᵀ / √d) v`` for each head of width ``d = dim / heads``."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}; choose a multiple of the heads")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def bias(self, x: Tensor) -> Tensor | None:
        """What is added to the logits, [T,T] or [B,H,T,T]; None for plain attention."""
        return None

    def forward(self, x: Tensor, capture: bool = False, fused: bool | None = None) -> tuple[Tensor, Tensor | None]:
        """``x`` [B,T,D] → output [B,T,D] and, with ``capture``, the probabilities [B,H,T,T] in float32.

        ``fused`` chooses PyTorch's fused kernel; by default it is used on CUDA, where it is faster, and not on a CPU,
        where the explicit product is (its bf16 backward takes a third of the time). Captured maps take the explicit
        path.
        """
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
        bias = self.bias(x)
        attn = None
        if fused is None:
            fused = x.is_cuda and not capture
        if fused:
            if capture:
                raise ValueError("fused=True keeps no attention maps; ask for capture=True without it")
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            logits = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
            if bias is not None:
                logits = logits + bias
            attn = logits.float().softmax(-1) if capture else logits.softmax(-1)
            y = attn.to(v.dtype) @ v
        y = self.proj(y.transpose(1, 2).reshape(B, T, D))
        return y, (attn if capture else None)


class MaskedDiagonal(Attention):
    """No token may look at itself: the diagonal of the logits is −∞ (CLS included)."""

    def bias(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        return torch.zeros(T, T, dtype=x.dtype, device=x.device).fill_diagonal_(float("-inf"))


FLAVOURS = {"plain": Attention, "masked-diagonal": MaskedDiagonal}
