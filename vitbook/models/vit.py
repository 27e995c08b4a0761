"""The Vision Transformer of this book, and timm's plain ViTs turned into it.

Pre-norm, GELU, learned positions, qkv bias, truncated-normal start (σ = 0.02), no dropout (Dosovitskiy et al. 2021; the
sizes of sources A and B are settings of it). Parameters are named as in timm's ``VisionTransformer``, so a state dict
of either loads in the other.
"""

from copy import deepcopy
from dataclasses import asdict, dataclass, replace

import timm
import torch
from timm.layers import GELU, DropPath
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.models.attention import FLAVOURS, refine
from vitbook.models.gaussian import BIASES

Size = int | tuple[int, int]


def pair(size: Size) -> tuple[int, int]:
    """(rows, columns) of a side given once or twice."""
    return (size, size) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT, pure data. The defaults are source A's model: 8 × 192, 2,417,956 parameters, 100 classes."""

    image: Size = 32  # pixels, side or (rows, columns)
    patch: Size = 4  # pixels
    dim: int = 192  # D, width of a token
    depth: int = 8  # L, number of blocks
    heads: int = 8  # H, heads a block
    mlp_ratio: float = 2  # hidden width of the MLP / D
    classes: int = 100  # K; 0 leaves the head out
    pool: str = "cls"  # what the head reads: "cls", or "mean" over the patches
    cls_token: bool = True
    registers: int = 0  # extra tokens without a place, after CLS
    drop_path: float = 0.0  # of the last block; grows linearly from 0 in the first
    attention: str = "plain"  # a flavour of models.attention
    positions: bool = True  # learned position embeddings; False: tokens of an image are a set
    refine: bool = False  # PRR of LocAt, before the head reads

    def __post_init__(self):
        for name in ("image", "patch"):  # JSON has lists: one spelling for both
            size = getattr(self, name)
            if not isinstance(size, int):
                object.__setattr__(self, name, tuple(size))
        if any(i < 1 or p < 1 or i % p for i, p in zip(pair(self.image), pair(self.patch), strict=True)):
            raise ValueError(f"image={self.image} is not divisible by patch={self.patch}; sides must be whole patches")
        if self.heads < 1 or self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not divisible by heads={self.heads}; choose a multiple of the heads")
        if self.pool not in ("cls", "mean"):
            raise ValueError(f"pool={self.pool!r} is unknown; choose 'cls' or 'mean'")
        if self.pool == "cls" and not self.cls_token:
            raise ValueError("pool='cls' needs cls_token=True; without a CLS token choose pool='mean'")
        if self.attention not in FLAVOURS:
            raise ValueError(f"attention={self.attention!r} is unknown; choose one of {', '.join(FLAVOURS)}")
        if self.attention == "positional" and not self.positions:
            raise ValueError("attention='positional' needs positions=True: positions are all that it reads")
        if self.depth < 1 or self.registers < 0 or self.classes < 0 or not 0 <= self.drop_path < 1:
            raise ValueError(f"{self}: depth ≥ 1, registers ≥ 0, classes ≥ 0 and 0 ≤ drop_path < 1 are needed")

    def build(self) -> "ViT":
        return ViT(**asdict(self))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches; N = rows · columns."""
        return tuple(i // p for i, p in zip(pair(self.image), pair(self.patch), strict=True))

    @property
    def prefix(self) -> int:
        """Tokens without a place, at the front: CLS, then registers."""
        return int(self.cls_token) + self.registers

    def flops(self) -> int:
        """Floating-point operations of one image's forward pass (2 per multiply-add), matrix products only.

        Per block: qkv and projection 4TD², MLP 2rTD², attention's two products 2T²D multiply-adds; a bias of LocAt
        reads up to three numbers a token and head, 3TD. PRR: once more 2T²D.
        """
        (rows, cols), (ph, pw) = self.grid, pair(self.patch)
        N, T, D = rows * cols, rows * cols + self.prefix, self.dim
        products = 2 * T * T * D
        block = (4 + 2 * self.mlp_ratio) * T * D * D + products
        if self.attention in BIASES:
            block += BIASES[self.attention].outputs * T * D
        top = D * self.classes + products * self.refine
        return int(2 * (3 * ph * pw * N * D + self.depth * block + top))


class PatchEmbed(nn.Module):
    """Cuts the image into patches and maps each linearly to a token: [B,3,rows·p,cols·p] → [B,N,D]."""

    def __init__(self, patch: tuple[int, int], dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        B, C, rows, cols = x.shape
        ph, pw = self.proj.kernel_size
        # The same numbers as the convolution, as one matrix product: several times faster on a CPU.
        x = x.reshape(B, C, rows // ph, ph, cols // pw, pw).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * ph * pw)
        return F.linear(x, self.proj.weight.flatten(1), self.proj.bias)


class MLP(nn.Module):
    """Two layers with a GELU between, on each token by itself."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm block: ``x + Attention(LN(x))``, then ``x + MLP(LN(x))``."""

    def __init__(self, config: ViTConfig, drop_path: float):
        super().__init__()
        dim = config.dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = FLAVOURS[config.attention](dim, config.heads, config.grid, config.prefix)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        # Rounded down as in timm; the nudge keeps a ratio that was found by division whole (56 · (61 / 56) < 61).
        self.mlp = MLP(dim, int(dim * config.mlp_ratio + 1e-9))
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, capture: bool = False, fused: bool | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, attn = self.attn(self.norm1(x), capture, fused, positions)
        mid = x + self.drop_path(y)
        return mid + self.drop_path(self.mlp(self.norm2(mid))), mid, attn


class ViT(nn.Module):
    """``ViT(image=32, patch=4, dim=192, depth=8, heads=8, …)``: the fields of :class:`ViTConfig`.

    With ``capture=True``, ``forward`` also returns named intermediates:

    ============== =========== =========================================================
    ``embed``      [B,T,D]     tokens with positions, before the first block
    ``blockI.attn`` [B,H,T,T]  attention probabilities (row = query, column = key), float32
    ``blockI.mid`` [B,T,D]     after the attention branch is added
    ``blockI.out`` [B,T,D]     after the MLP branch is added
    ============== =========== =========================================================

    T = prefix + N tokens; patch (r, c) of the grid is token ``prefix + r · columns + c``. What ``refine`` makes of the
    last block's tokens goes to the head alone.
    """

    def __init__(self, **fields):
        super().__init__()
        self.config = c = ViTConfig(**fields)
        self.grid, self.prefix, self.has_cls = c.grid, c.prefix, c.cls_token
        tokens = c.prefix + c.grid[0] * c.grid[1]
        self.patch_embed = PatchEmbed(pair(c.patch), c.dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.dim)) if c.cls_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.dim)) if c.registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, c.dim)) if c.positions else None
        rates = torch.linspace(0, c.drop_path, c.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(c, rate) for rate in rates)
        # timm's places: the final norm stands before CLS is read, but after a mean over patches is taken.
        self.norm = nn.LayerNorm(c.dim, eps=1e-6) if c.pool == "cls" else nn.Identity()
        self.fc_norm = nn.LayerNorm(c.dim, eps=1e-6) if c.pool == "mean" else nn.Identity()
        self.head = nn.Linear(c.dim, c.classes) if c.classes else nn.Identity()
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.trunc_normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor, capture: bool = False, fused: bool | None = None):
        """Normalised images [B,3,rows,columns] → logits [B,K]; with ``capture`` (logits, intermediates).

        ``fused`` as in :class:`~vitbook.models.attention.Attention`; the explicit and the fused path give equal logits.
        """
        if x.shape[1:] != (3, *pair(self.config.image)) or not x.is_floating_point():
            raise ValueError(
                f"images of shape {tuple(x.shape)}, {x.dtype}, do not fit a ViT for [B, 3, {pair(self.config.image)}], "
                "normalised floats"
            )
        x = self.patch_embed(x)
        front = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*front, x], 1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        kept = {"embed": x}
        for i, block in enumerate(self.blocks):
            x, mid, attn = block(x, capture, fused, self.pos_embed)
            if capture:
                kept |= {f"block{i}.attn": attn, f"block{i}.mid": mid, f"block{i}.out": x}
        x = self.norm(x)
        if self.config.refine:
            x = refine(x, self.config.heads)
        x = x[:, 0] if self.config.pool == "cls" else x[:, self.prefix :].mean(1)
        logits = self.head(self.fc_norm(x))
        return (logits, kept) if capture else logits


def resized(model: ViT, image: Size) -> ViT:
    """A copy for images of another size in pixels: positions resampled as timm does, all other weights the same.

    A bias of LocAt keeps the bound of the grid that it was trained on and widens by its own rule; so keep the copy, not
    its config, from which another bias would be built.
    """
    config = replace(model.config, image=image)
    copy = deepcopy(model)
    copy.config, copy.grid = config, config.grid
    if copy.pos_embed is not None:
        front, places = copy.pos_embed.detach().tensor_split([model.prefix], 1)
        places = F.interpolate(places.mT.unflatten(2, model.grid), config.grid, mode="bicubic", antialias=True)
        positions = torch.cat([front, places.flatten(2).mT], 1)
        copy.pos_embed = nn.Parameter(positions, copy.pos_embed.requires_grad)
    for block in copy.blocks:
        block.attn.grid = config.grid
    return copy


def unsupported(model: nn.Module) -> list[str]:
    """What a timm model has that :class:`ViT` has not, by name; empty when ``from_timm`` takes it."""
    if type(model) is not timm_vit.VisionTransformer:
        return [f"class {type(model).__name__} (only timm's VisionTransformer itself is taken)"]
    blocks, identity = model.blocks, nn.Identity

    def any_block(test) -> bool:
        return any(test(b) for b in blocks)

    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    if any_block(lambda b: type(b) is not timm_vit.Block):
        return [f"block class {type(blocks[0]).__name__}"]
    if any_block(lambda b: type(b.attn) is not timm_vit.Attention):
        return [f"attention class {type(blocks[0].attn).__name__}"]
    found = {
        "q/k norm": any_block(lambda b: not isinstance(b.attn.q_norm, identity)),
        "layer scale": any_block(lambda b: not isinstance(b.ls1, identity)),
        "no qkv bias": any_block(lambda b: b.attn.qkv.bias is None or b.attn.proj.bias is None),
        "a norm inside attention or MLP": any_block(
            lambda b: (
                not isinstance(getattr(b.attn, "norm", identity()), identity)
                or not isinstance(getattr(b.mlp, "norm", identity()), identity)
            )
        ),
        "an MLP that is not fc1, GELU, fc2": any_block(
            lambda b: (
                type(b.mlp).__name__ != "Mlp"
                or not isinstance(b.mlp.act, (nn.GELU, GELU))
                or getattr(b.mlp.act, "approximate", "none") != "none"
            )
        ),
        "a norm that is not LayerNorm with eps 1e-6": any_block(lambda b: not isinstance(b.norm1, nn.LayerNorm))
        or any(m.eps != 1e-6 for m in norms),
        "a norm before the blocks": not isinstance(model.norm_pre, identity)
        or not isinstance(model.patch_embed.norm, identity),
        "a patch embedding that is not one convolution": type(model.patch_embed).__name__ != "PatchEmbed"
        or not isinstance(model.patch_embed.proj, nn.Conv2d)
        or model.patch_embed.proj.in_channels != 3
        or model.patch_embed.proj.bias is None,
        "no learned position embedding": model.pos_embed is None,
        f"pooling {model.global_pool!r}": model.global_pool not in ("token", "avg"),
        "pooling over CLS and registers": getattr(model, "pool_include_prefix", False),
        "the final norm at another place, or none": isinstance(model.fc_norm, identity) == (model.global_pool == "avg")
        or isinstance(model.norm, identity) != (model.global_pool == "avg"),
        "CLS pooling without a CLS token": model.global_pool == "token" and model.cls_token is None,
        "dropout": any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
        or not isinstance(model.patch_drop, identity),
    }
    return [name for name, here in found.items() if here]


def from_timm(name_or_model: str | nn.Module, pretrained: bool = False) -> ViT:
    """A plain timm ViT as a :class:`ViT` with the same weights, hence the same logits.

    Taken: any patch, image, width, depth and head count; CLS token or none; registers; CLS or mean pooling; position
    embeddings with or without the tokens at the front; drop path. Everything else (q/k norm, layer scale, other
    pooling, …) raises ``ValueError`` by name: :func:`vitbook.models.adapters.capture` measures those as they are.
    """
    model = timm.create_model(name_or_model, pretrained=pretrained) if isinstance(name_or_model, str) else name_or_model
    if refused := unsupported(model):
        raise ValueError(
            f"from_timm cannot take this {type(model).__name__}: it has {'; '.join(refused)}. "
            "Measure it as it is with vitbook.models.adapters.capture(model)"
        )
    registers = 0 if model.reg_token is None else model.reg_token.shape[1]
    weights = dict(model.state_dict())
    ours = ViT(
        image=tuple(model.patch_embed.img_size),
        patch=tuple(model.patch_embed.patch_size),
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=model.blocks[0].attn.num_heads,
        mlp_ratio=model.blocks[0].mlp.fc1.out_features / model.embed_dim,
        classes=model.num_classes,
        pool="mean" if model.global_pool == "avg" else "cls",
        cls_token=model.cls_token is not None,
        registers=registers,
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
    )
    if model.no_embed_class:  # timm then adds no position to the front; a position of zero is the same
        weights["pos_embed"] = F.pad(weights["pos_embed"], (0, 0, ours.prefix, 0))
    ours.load_state_dict(weights)
    return ours.train(model.training)
