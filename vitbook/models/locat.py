"""LocAt (Hajimiri et al. 2026) added to a model that is there: GAug in every attention layer, PRR before the head.

Both parts can stand alone; both keep every weight the model has. GAug is :class:`GaussianBias`, PRR is :func:`refine`.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models import vision_transformer as timm_vit
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.models.attention import GaussianAttention, refine
from vitbook.models.gaussian import BIASES, GaussianBias
from vitbook.models.vit import ViT

__all__ = ["GaussianBias", "add_locat", "refine"]


def _heads(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B,H,T,d] of a timm layer whose ``qkv`` makes all three."""
    return layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _attend(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """[B,T,C] of softmax(q kᵀ / √d + bias) v, fused or not as the timm layer is set."""
    if layer.fused_attn:
        drop = layer.attn_drop.p if layer.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), dropout_p=drop)
    else:
        attn = layer.attn_drop((q * layer.scale @ k.transpose(-2, -1) + bias).softmax(-1))
        y = attn.to(v.dtype) @ v
    return y.transpose(1, 2).flatten(2)


def _no_mask(layer: nn.Module, mask: Tensor | None, causal: bool) -> None:
    if mask is not None or causal:
        raise ValueError(f"{type(layer).__name__} takes no mask (attn_mask, is_causal); call the model without one")


class LocAtAttention(timm_vit.Attention):
    """timm's attention with the bias ``gaug``; ``grid`` is set by the model before each call."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _no_mask(self, attn_mask, is_causal)
        q, k, v = _heads(self, x)
        q, k = self.q_norm(q), self.k_norm(k)
        y = _attend(self, q, k, v, self.gaug(q, self.grid, x))
        return self.proj_drop(self.proj(self.norm(y)))


class LocAtAttentionRope(AttentionRope):
    """timm's rotary attention with the bias ``gaug``, which reads the queries before they are rotated."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _no_mask(self, attn_mask, is_causal)
        q, k, v = _heads(self, x)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = self.gaug(q, self.grid, x)
        if rope is not None:
            q, k = self._rotate(q, rope).type_as(v), self._rotate(k, rope).type_as(v)
        return self.proj_drop(self.proj(self.norm(_attend(self, q, k, v, bias))))

    def _rotate(self, t: Tensor, rope: Tensor) -> Tensor:
        n = self.num_prefix_tokens
        return torch.cat([t[:, :, :n], apply_rot_embed_cat(t[:, :, n:], rope)], 2)


class LocAtWindowAttention(WindowAttention):
    """Swin's attention with the bias ``gaug`` beside relative positions and the mask of shifted windows.

    The grid is the window, which has no token in front.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = _heads(self, x)
        bias = self.gaug(q, self.window_size, x) + self._get_rel_pos_bias()
        if mask is not None:  # [windows,T,T]; the windows of one image stand together
            bias = (bias.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return self.proj_drop(self.proj(_attend(self, q, k, v, bias)))


class _Sequence:
    """What a timm model of tokens in a row needs: layers that know the grid, PRR before tokens are pooled."""

    def _pos_embed(self, x: Tensor):
        grid, own = (x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size), self.patch_embed.grid_size
        if self.grad_checkpointing and torch.is_grad_enabled() and tuple(grid) != tuple(own):
            raise ValueError(
                f"images of {tuple(grid)} patches with gradient checkpointing, where layers run again with the grid of "
                "the latest call: tell the model its size, set_input_size(img_size=…), or set_grad_checkpointing(False)"
            )
        for block in self.blocks:
            block.attn.grid = tuple(grid)
        return super()._pos_embed(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        return super().pool(refine(x, self.refine_heads) if self.refine_heads else x, pool_type)


class LocAtVisionTransformer(_Sequence, timm_vit.VisionTransformer):
    """timm's ``VisionTransformer`` with LocAt; made by :func:`add_locat`."""


class LocAtEva(_Sequence, Eva):
    """timm's ``Eva`` skeleton with LocAt; made by :func:`add_locat`."""


class LocAtSwin(SwinTransformer):
    """timm's ``SwinTransformer`` with LocAt; made by :func:`add_locat`."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.refine_heads:
            x = refine(x.flatten(1, 2), self.refine_heads).view_as(x)
        return super().forward_head(x, pre_logits)


FAMILIES = {  # timm's model and attention class: ours
    timm_vit.VisionTransformer: (LocAtVisionTransformer, timm_vit.Attention, LocAtAttention),
    Eva: (LocAtEva, AttentionRope, LocAtAttentionRope),
    SwinTransformer: (LocAtSwin, WindowAttention, LocAtWindowAttention),
}


def _layers(model: nn.Module) -> list[nn.Module]:
    """The attention layer of each block, or the block itself where it has none."""
    stages = model.layers if isinstance(model, SwinTransformer) else [model]
    return [getattr(block, "attn", block) for stage in stages for block in stage.blocks]


def _refused(model: nn.Module) -> list[str]:
    """What a timm model has that LocAt cannot be added to, by name."""
    if type(model) not in FAMILIES:
        return [f"class {type(model).__name__} (taken: {', '.join(kind.__name__ for kind in FAMILIES)})"]
    layers, wanted = _layers(model), FAMILIES[type(model)][1]
    if other := [type(layer).__name__ for layer in layers if type(layer) is not wanted]:
        return [f"attention class {other[0]} (taken: {wanted.__name__})"]
    found = {
        "queries and keys that are projected apart": any(layer.qkv is None for layer in layers),
        "heads that are not of width dim / heads": any(
            layer.qkv is not None and layer.qkv.out_features != 3 * layer.qkv.in_features for layer in layers
        ),
        "a gate on its attention": any(getattr(layer, "gate", None) is not None for layer in layers),
        "rotation by halves": any(getattr(layer, "rotate_half", False) for layer in layers),
        "patch dropout": not isinstance(getattr(model, "patch_drop", None), nn.Identity | None),
        f"pooling {model.global_pool!r} (taken: 'token', 'avg')": model.global_pool not in ("token", "avg"),
    }
    return [name for name, here in found.items() if here]


def add_locat(model: nn.Module, attention: str = "gaug", refine: bool = True) -> nn.Module:
    """A copy of ``model`` with LocAt: same weights, a fresh bias in every layer, PRR before the head.

    ``model``: a plain :class:`~vitbook.models.vit.ViT`, or timm's ``VisionTransformer`` (registers and images of
    changing size included), ``Eva`` with rotary attention, or ``SwinTransformer``; others raise ``ValueError`` by name.
    ``attention``: GAug or a variant of it (:data:`~vitbook.models.gaussian.BIASES`), or ``"plain"`` for PRR alone;
    ``refine=False`` adds GAug alone. The new parameters are ``….attn.gaug.log_var`` and ``….attn.gaug.log_alpha``, as
    in the released weights. The result of a fresh bias is not that of the model before: α starts at ln 2, not at 0.
    """
    if attention not in ("plain", *BIASES):
        raise ValueError(f"attention={attention!r} is no part of LocAt; choose one of plain, {', '.join(BIASES)}")
    if isinstance(model, ViT):
        return _add_to_ours(model, attention, refine)
    if refused := _refused(model):
        raise ValueError(f"add_locat cannot take this {type(model).__name__}: it has {'; '.join(refused)}")
    model = deepcopy(model)
    kind, _, layer_kind = FAMILIES[type(model)]
    layers = _layers(model)
    model.refine_heads = layers[-1].num_heads if refine else 0
    if attention != "plain":
        for layer in layers:
            windowed = isinstance(layer, WindowAttention)
            grid = tuple(layer.window_size if windowed else model.patch_embed.grid_size)
            prefix = 0 if windowed else model.num_prefix_tokens
            bias = BIASES[attention].for_layer(layer.qkv.in_features, layer.num_heads, grid, prefix)
            layer.gaug = bias.to(layer.qkv.weight).train(layer.training)
            if not windowed:
                layer.grid = grid  # for a layer called by itself; a model says its grid before each call
            layer.__class__ = layer_kind
    model.__class__ = kind
    return model


def _add_to_ours(model: ViT, attention: str, refine: bool) -> ViT:
    if model.config.attention != "plain" or model.config.refine:
        raise ValueError(
            f"add_locat takes a plain ViT; this one has attention={model.config.attention!r}, "
            f"refine={model.config.refine}: build it with the fields you want, ViT(attention=…, refine=…)"
        )
    new = deepcopy(model)
    new.config = replace(model.config, attention=attention, refine=refine)
    if attention != "plain":
        for block in new.blocks:
            bias = BIASES[attention].for_layer(new.config.dim, block.attn.heads, new.grid, new.prefix)
            block.attn.gaug = bias.to(block.attn.qkv.weight).train(block.attn.training)
            block.attn.__class__ = GaussianAttention
    return new
