"""GAug of LocAt (Hajimiri et al. 2026): a bias on the logits that draws every patch towards its surroundings.

For a patch query q_p of one head, before the scale 1/√d and before any rotation, and offsets Δ_r, Δ_c in whole patches
between the places of p and t (the formulas of the released code; h₀ × w₀ is the grid the layer was built for)::

    Σ_p  = M sigmoid(W^σ q_p + b^σ − ln(M − 1)),  M = max(h₀, w₀)²       two variances: of rows, of columns
    α_p  = softplus(W^α q_p + b^α)
    S_pt = α_p exp(−½ Σ_m min(Δ_m², (max(h₀, w₀) − 1)²) / (Σ_pm + ε))

S is added to the logits. It is a bump upon far keys' nought, no penalty on them; rows and columns of tokens without a
place are zero. The exponential of a sum is a product, so exp is taken of N (h + w) values, not of N².

The released code has no ablations. The variants here are **our reading** of what the paper names; the count is of 12
layers with d = 64:

=================== ====================================================================== =============================
variant             what differs                                                           parameters
=================== ====================================================================== =============================
``GaussianBias``    –                                                                      2,340
``AutoScale``       α_p is the root mean square of q_p, the size of its own logits         1,560
``NoScale``         α_p = 1                                                                1,560
``Isotropic``       one variance for rows and columns                                      1,560
``FixedWidth``      Σ_p = 1, where the learned one starts                                  780
``FromInput``       Σ_p is read from the layer's input, for all heads alike                5,412 (D = 192), 19,236 (768)
``Laplace``         S = α exp(−(|Δ_r|/σ_r + |Δ_c|/σ_c)), with σ = √(Σ + ε)                 2,340
``InverseDistance`` S = α / (1 + |Δ_r|/σ_r + |Δ_c|/σ_c)                                   2,340
=================== ====================================================================== =============================
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Grid = tuple[int, int]


def _read(t: Tensor, *layers: nn.Linear) -> Tensor:
    """What ``layers`` make of ``t``, side by side, in the precision of ``t``, whatever that of their weights."""
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]).to(t.dtype) for name in ("weight", "bias"))
    return F.linear(t, weight, bias)


def _reader(width: int, outputs: int) -> nn.Linear:
    """A layer as every other of a ViT starts: truncated normal with σ = 0.02, biases zero."""
    layer = nn.Linear(width, outputs)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class _AddProduct(torch.autograd.Function):
    """``logits + one · other`` among the patches, in place: ``one`` [B,H,h,w,h,1], ``other`` [B,H,h,w,1,w].

    Autograd's own way through a product and a sum of N² numbers takes twice the time and keeps them.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, one: Tensor, other: Tensor, prefix: int) -> Tensor:
        ctx.mark_dirty(logits)
        ctx.save_for_backward(one, other)
        ctx.prefix = prefix
        return _add_product(logits, one, other, prefix)

    @staticmethod
    def backward(ctx, grad: Tensor):
        one, other = ctx.saved_tensors
        among = _among_patches(grad, ctx.prefix, one.shape[2:4]).to(one.dtype).contiguous()  # once, not in each product
        return grad, among @ other.mT, one.mT @ among, None


def _add_product(logits: Tensor, one: Tensor, other: Tensor, prefix: int) -> Tensor:
    _among_patches(logits, prefix, one.shape[2:4]).addcmul_(one.to(logits.dtype), other.to(logits.dtype))
    return logits


def _among_patches(t: Tensor, prefix: int, grid: Grid) -> Tensor:
    """The part of [B,H,T,T] in which patches look at patches, [B,H,h,w,h,w]; a view."""
    return t[:, :, prefix:, prefix:].unflatten(3, grid).unflatten(2, grid)


class GaussianBias(nn.Module):
    """``GaussianBias(head_dim, grid, prefix=1)``: q [B,H,T,d] → S [B,H,T,T], to be added to the scaled logits.

    ``grid``: rows and columns of patches in training; ``prefix``: tokens without a place in front. One pair of layers
    serves all heads. The names ``log_var`` and ``log_alpha`` are those of the released weights; no logarithm is meant.
    At a zero query Σ = 1 and α = ln 2.

    ε starts at 0.1 and is doubled until half of float16's range holds the quotient and its gradient. On another grid
    than that of training, M, ε and the largest offset stay, and Σ grows by the ratio of the shorter sides. Layers built
    for 32 rows or more **train** coarsely: Σ and α come from the mean query of a cell of 2 × 2 patches, offsets are
    those between cells, and sides must be even. Evaluation is exact.

    Computed in float32 whatever the autocast, given back in the query's type. ``ValueError``: the queries are not of
    that grid; an odd side where training is coarse; in evaluation, α beyond float16's range when that is the query's
    type (in training such a loss is not finite).
    """

    outputs = 3  # numbers read from each query

    def __init__(self, head_dim: int, grid: Grid, prefix: int = 1):
        super().__init__()
        self.grid, self.prefix = tuple(grid), prefix
        if head_dim < 1 or len(self.grid) != 2 or min(self.grid) < 1 or prefix < 0:
            raise ValueError(
                f"head_dim={head_dim}, grid={grid}, prefix={prefix}: a head dimension and (rows, columns) of at least "
                "one, and a prefix that is not negative, are needed"
            )
        self.log_var, self.log_alpha = _reader(head_dim, 2), _reader(head_dim, 1)
        side = max(self.grid)
        self.bound = side**2  # M
        self.shift = math.log(self.bound - 1) if self.bound > 2 else 0.0
        self.reach = min(side - 1, math.sqrt(13100))  # the largest offset; the released code's cap for huge grids too
        self.epsilon = 0.1
        while 0.5 * (side - 1) ** 2 / self.epsilon**2 > 32500:
            self.epsilon *= 2

    @classmethod
    def for_layer(cls, dim: int, heads: int, grid: Grid, prefix: int) -> "GaussianBias":
        """The bias of an attention layer of width ``dim``."""
        return cls(dim // heads, grid, prefix)

    def read(self, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """What Σ is made of, [B,H,T,2] or [B,H,T,1], and α, [B,H,T,1], read from queries [B,H,T,d]."""
        z = _read(q, self.log_var, self.log_alpha)  # at once: on the way back a query's gradient is made once
        return z[..., :-1], z[..., -1:]

    def variance(self, z: Tensor) -> Tensor:
        """Σ, in (0, M), of what was read; 1 at zero."""
        return self.bound * torch.sigmoid(z - self.shift)

    def scale(self, z: Tensor) -> Tensor:
        """α, positive, of what was read."""
        return F.softplus(z)

    @staticmethod
    def kernel(rows: Tensor, cols: Tensor, width: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors of S [B,H,h,w,h,w]: one of rows, [B,H,h,w,h,1], with α, and one of columns, [B,H,h,w,1,w].

        ``rows`` [h,1,h] and ``cols`` [w,w] hold |Δ|; ``width`` [B,H,h,w,2] is Σ + ε; ``alpha`` [B,H,h,w,1].
        """
        rate = -0.5 / width
        one = alpha * torch.exp(rows.square() * rate[..., :1])
        return one[..., None], torch.exp(cols.square() * rate[..., -1:])[..., None, :]

    def _step(self) -> int:
        """Patches a side of a cell."""
        return 2 if self.training and self.grid[0] >= 32 else 1

    def _cells(self, z: Tensor, grid: Grid) -> Tensor:
        """Tokens [B,H,T,n] → patches [B,H,h,w,n]; in coarse training, each cell's mean."""
        z = z[:, :, self.prefix :].unflatten(2, grid)
        step = self._step()
        return z if step == 1 else z.unflatten(3, (-1, step)).unflatten(2, (-1, step)).mean((3, 5))

    def _check(self, q: Tensor, grid: Grid | None) -> Grid:
        rows, cols = grid = tuple(grid or self.grid)
        T = self.prefix + rows * cols
        if q.ndim != 4 or q.shape[2] != T:
            raise ValueError(
                f"queries of shape {tuple(q.shape)} do not match the grid {grid} with {self.prefix} tokens in front, "
                f"[B, H, {T}, d]; give the grid of these images as grid="
            )
        if rows % self._step() or cols % self._step():
            raise ValueError(
                f"grid {grid} has an odd side, but a layer built for {self.grid[0]} rows (32 or more) trains on cells "
                "of 2 × 2 patches; choose images of an even number of patches a side"
            )
        return grid

    def predict(self, q: Tensor, grid: Grid | None = None, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Σ [B,H,h,w,2] (rows, columns; without ε) and α [B,H,h,w,1] of every patch query; arguments as below."""
        grid = self._check(q, grid)
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
            q = q.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
            # A mean of what was read is what is read from the mean query: reading is affine.
            width, scale = (self._cells(z, grid) for z in self.read(q, x))
            var, alpha = self.variance(width), self.scale(scale)
        if grid != self.grid:
            var = var * (min(grid) / min(self.grid))
        if (step := self._step()) > 1:
            var, alpha = (t.repeat_interleave(step, 2).repeat_interleave(step, 3) for t in (var, alpha))
        return var, alpha

    def _factors(self, q: Tensor, grid: Grid | None, x: Tensor | None) -> tuple[Tensor, Tensor]:
        var, alpha = self.predict(q, grid, x)
        looked = q.dtype == torch.float16 and not self.training  # in training it would stop the device at every layer
        if looked and (largest := alpha.amax().item()) > torch.finfo(q.dtype).max:
            raise ValueError(f"α = {largest:.3g} overflows float16 (largest 65504); use bfloat16 or float32")
        offsets = []
        for side in grid or self.grid:
            place = torch.arange(side, device=q.device) // self._step() * self._step()
            offsets.append((place[:, None] - place).abs().to(var.dtype).clamp(max=self.reach))
        return self.kernel(offsets[0][:, None], offsets[1], var + self.epsilon, alpha)

    def forward(self, q: Tensor, grid: Grid | None = None, x: Tensor | None = None) -> Tensor:
        """q [B,H,T,d] → S [B,H,T,T]; ``grid``: that of these tokens, by default that of training.

        ``x`` [B,T,D] is the layer's input, read by the variant that takes the variance from there.
        """
        self._check(q, grid)
        B, H, T, _ = q.shape
        nought = q.new_zeros(B, H, T, T, dtype=torch.promote_types(q.dtype, torch.float32))
        return self.add_to(nought, q, grid, x).to(q.dtype)

    def add_to(self, logits: Tensor, q: Tensor, grid: Grid | None = None, x: Tensor | None = None) -> Tensor:
        """``logits`` [B,H,T,T] with S added in place; S itself is never made, nor kept for the way back.

        Its two factors are rounded to the type of the logits.
        """
        one, other = self._factors(q, grid, x)
        # Without gradients plainly: torch.compile cannot trace an in-place autograd.Function that needs none.
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (logits, one, other))
        add = _AddProduct.apply if wanted else _add_product
        return add(logits, one, other.expand(*one.shape[:4], 1, -1), self.prefix)


class AutoScale(GaussianBias):
    """α_p = √(mean of q_p²): with keys of unit mean square, q_p's logits have this standard deviation."""

    outputs = 2

    def __init__(self, head_dim: int, grid: Grid, prefix: int = 1):
        super().__init__(head_dim, grid, prefix)
        del self.log_alpha

    def read(self, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        return _read(q, self.log_var), q

    def scale(self, z: Tensor) -> Tensor:
        return (z.square().mean(-1, keepdim=True) + 1e-12).sqrt()  # a zero query has a gradient too


class NoScale(AutoScale):
    """α_p = 1."""

    def scale(self, z: Tensor) -> Tensor:
        return torch.ones_like(z[..., :1])


class Isotropic(GaussianBias):
    """One variance for rows and columns."""

    outputs = 2

    def __init__(self, head_dim: int, grid: Grid, prefix: int = 1):
        super().__init__(head_dim, grid, prefix)
        self.log_var = _reader(head_dim, 1)


class FixedWidth(GaussianBias):
    """Σ_p = 1 in rows and columns, for every query."""

    outputs = 1

    def __init__(self, head_dim: int, grid: Grid, prefix: int = 1):
        super().__init__(head_dim, grid, prefix)
        del self.log_var

    def read(self, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        return q.new_zeros(*q.shape[:-1], 2), _read(q, self.log_alpha)


class FromInput(GaussianBias):
    """Σ_p is read from the layer's (normalised) input of width ``dim`` in place of the query; α_p still from q_p."""

    def __init__(self, head_dim: int, grid: Grid, prefix: int, dim: int):
        super().__init__(head_dim, grid, prefix)
        self.log_var = _reader(dim, 2)

    @classmethod
    def for_layer(cls, dim: int, heads: int, grid: Grid, prefix: int) -> "FromInput":
        return cls(dim // heads, grid, prefix, dim)

    def read(self, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        dim = self.log_var.in_features
        if x is None or x.shape != (len(q), q.shape[2], dim):
            given = x if x is None else list(x.shape)
            raise ValueError(
                f"FromInput reads the variance from the layer's input; give it as x=, [B, T, D] = "
                f"{[len(q), q.shape[2], dim]}, not {given}"
            )
        return _read(x[:, None].to(q.dtype), self.log_var), _read(q, self.log_alpha)


class Laplace(GaussianBias):
    """S = α exp(−(|Δ_r|/σ_r + |Δ_c|/σ_c))."""

    @staticmethod
    def kernel(rows: Tensor, cols: Tensor, width: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        rate = -width.rsqrt()
        one = alpha * torch.exp(rows * rate[..., :1])
        return one[..., None], torch.exp(cols * rate[..., -1:])[..., None, :]


class InverseDistance(GaussianBias):
    """S = α / (1 + |Δ_r|/σ_r + |Δ_c|/σ_c)."""

    @staticmethod
    def kernel(rows: Tensor, cols: Tensor, width: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        rate = width.rsqrt()
        far = (rows * rate[..., :1])[..., None] + (cols * rate[..., -1:])[..., None, :]
        return alpha[..., None] / (1 + far), torch.ones_like(alpha[..., None])  # no product of rows and columns

    def add_to(self, logits: Tensor, q: Tensor, grid: Grid | None = None, x: Tensor | None = None) -> Tensor:
        bias = self._factors(q, grid, x)[0].flatten(4).flatten(2, 3).to(logits.dtype)
        return logits + F.pad(bias, (self.prefix, 0, self.prefix, 0))


BIASES: dict[str, type[GaussianBias]] = {
    "gaug": GaussianBias,
    "gaug-auto-scale": AutoScale,
    "gaug-no-scale": NoScale,
    "gaug-isotropic": Isotropic,
    "gaug-fixed-width": FixedWidth,
    "gaug-from-input": FromInput,
    "laplace": Laplace,
    "inverse-distance": InverseDistance,
}
