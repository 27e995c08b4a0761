"""The Jumbo ViT, a CLS token as wide as six patches, and LocAt on it.

Written from the parameter counts and the description of the released LocAt code: they fix every width here (17,348,776
parameters at tiny, 260,495,080 at base; LocAt adds 2,724 and 3,876).
"""

import math

import torch
from timm.models.vision_transformer import LayerScale
from torch import Tensor, nn

from vitbook.models.attention import FLAVOURS, refine
from vitbook.models.gaussian import BIASES
from vitbook.models.vit import MLP, PatchEmbed, Size, ViTConfig, pair


class JumboBlock(nn.Module):
    """Attention among pieces and patches alike; then an MLP for each patch, and one for all pieces side by side."""

    def __init__(self, config: ViTConfig, pieces: int):
        super().__init__()
        dim, wide = config.dim, config.dim * pieces
        self.pieces = pieces
        self.norm1, self.ls1 = nn.LayerNorm(dim, eps=1e-6), LayerScale(dim, 1e-4)
        self.attn = FLAVOURS[config.attention](dim, config.heads, config.grid, pieces)
        self.norm2, self.ls2 = nn.LayerNorm(dim, eps=1e-6), LayerScale(dim, 1e-4)
        self.mlp = MLP(dim, 4 * dim)
        self.norm3, self.ls3 = nn.LayerNorm(wide, eps=1e-6), LayerScale(wide, 1e-4)

    def forward(self, x: Tensor, wide_mlp: MLP, capture: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        y, attn = self.attn(self.norm1(x), capture)
        mid = x + self.ls1(y)
        wide, patches = mid[:, : self.pieces].flatten(1), mid[:, self.pieces :]
        wide = wide + self.ls3(wide_mlp(self.norm3(wide)))
        patches = patches + self.ls2(self.mlp(self.norm2(patches)))
        return torch.cat([wide.unflatten(1, (self.pieces, -1)), patches], 1), mid, attn


class Jumbo(nn.Module):
    """``Jumbo(image=224, patch=16, dim=192, depth=12, heads=3, classes=1000, pieces=6, …)``: tiny, with LocAt.

    ``attention="plain", refine=False`` is the model without LocAt. The pieces stand in front, without a place; only
    patches have positions. The final norm acts on the pieces side by side; with PRR, patches get a norm of their own.
    The head starts at nought with bias −ln K. ``forward`` as in :class:`~vitbook.models.vit.ViT`.
    """

    has_cls = True

    def __init__(
        self,
        image: Size = 224,
        patch: Size = 16,
        dim: int = 192,
        depth: int = 12,
        heads: int = 3,
        classes: int = 1000,
        pieces: int = 6,
        attention: str = "gaug",
        refine: bool = True,
    ):
        super().__init__()
        if pieces < 1 or classes < 1 or attention not in ("plain", *BIASES):
            raise ValueError(
                f"pieces={pieces}, classes={classes}, attention={attention!r}: at least one piece and class, and "
                f"plain attention or one of {', '.join(BIASES)} are needed"
            )
        c = ViTConfig(
            image, patch, dim, depth, heads, classes=classes, attention=attention, refine=refine
        )  # what its blocks share with a ViT's, checked there
        self.image, self.heads, self.grid, self.prefix = pair(image), heads, c.grid, pieces
        self.patch_embed = PatchEmbed(pair(patch), dim)
        self.cls_token = nn.Parameter(torch.zeros(1, pieces, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, c.grid[0] * c.grid[1], dim))
        self.blocks = nn.ModuleList(JumboBlock(c, pieces) for _ in range(depth))
        self.wide_mlp = MLP(dim * pieces, 4 * dim * pieces)  # one for all blocks
        self.norm = nn.LayerNorm(dim * pieces, eps=1e-6)
        self.patch_norm = nn.LayerNorm(dim, eps=1e-6) if refine else None
        self.head = nn.Linear(dim * pieces, classes)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.trunc_normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, -math.log(classes))

    def forward(self, x: Tensor, capture: bool = False):
        """Normalised images [B,3,rows,columns] → logits [B,K]; with ``capture`` (logits, intermediates)."""
        if x.shape[1:] != (3, *self.image) or not x.is_floating_point():
            raise ValueError(
                f"images of shape {tuple(x.shape)} and {x.dtype} do not fit a Jumbo for normalised [B, 3, {self.image}]"
            )
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x) + self.pos_embed], 1)
        kept = {"embed": x}
        for i, block in enumerate(self.blocks):
            x, mid, attn = block(x, self.wide_mlp, capture)
            if capture:
                kept |= {f"block{i}.attn": attn, f"block{i}.mid": mid, f"block{i}.out": x}
        pieces = self.norm(x[:, : self.prefix].flatten(1))
        if self.patch_norm is not None:
            tokens = torch.cat([pieces.unflatten(1, (self.prefix, -1)), self.patch_norm(x[:, self.prefix :])], 1)
            pieces = refine(tokens, self.heads)[:, : self.prefix].flatten(1)
        logits = self.head(pieces)
        return (logits, kept) if capture else logits
