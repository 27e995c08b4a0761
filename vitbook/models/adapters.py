"""timm's models behind the interface of :class:`vitbook.models.vit.ViT`: logits and, when asked, named intermediates.

The book's own models need no hooks; these do, and this is the only place that has them. They last for one call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.models import vision_transformer as timm_vit
from timm.models.eva import Eva, EvaBlock
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

VITS = (timm_vit.VisionTransformer, Eva)
TAKEN = "timm's VisionTransformer and Eva (and classes derived from them), SwinTransformer and ResNet"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The residual blocks of a model, through all stages in the order of its forward pass."""
    if isinstance(model, VITS):
        return list(model.blocks)
    if isinstance(model, SwinTransformer):
        return [block for stage in model.layers for block in stage.blocks]
    if isinstance(model, ResNet):
        return [block for name, stage in model.named_children() if name.startswith("layer") for block in stage]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ValueError(
        f"capture cannot take a {kind}; it takes {TAKEN}. Unwrap what torch.compile or DataParallel gave (._orig_mod, "
        ".module); for another model write the call that measure_heads describes"
    )


class Captured:
    """A timm model called as ``captured(x) -> (logits, intermediates)``; with ``capture=False``, logits only.

    =============== ========= =================== ==================
    name            ViT, Eva  Swin                ResNet
    =============== ========= =================== ==================
    ``embed``       [B,T,D]   [B,rows,columns,C]  –
    ``stem``        –         –                   [B,C,rows,columns]
    ``blockI.attn`` [B,H,T,T] [B·windows,H,w²,w²] –
    ``blockI.mid``  [B,T,D]   –                   –
    ``blockI.out``  [B,T,D]   [B,rows,columns,C]  [B,C,rows,columns]
    =============== ========= =================== ==================

    ``embed`` and ``stem`` are what the first block receives; blocks are numbered through all stages; maps are float32
    probabilities; ``blockI.mid`` (after the attention branch is added) is there for pre-norm blocks. The windows of one
    image stand together, row by row; those of shifted blocks are cut from the rolled feature map.

    A call is made in evaluation mode and, when maps are wanted, with fused attention off; modes, fused attention and
    hooks are as before when it returns or fails. ``prefix`` tokens without a place stand in front, CLS first if
    ``has_cls``.
    """

    def __init__(self, model: nn.Module):
        self.blocks = _blocks(model)
        self.model = model
        self.prefix: int = getattr(model, "num_prefix_tokens", 0)
        self.has_cls: bool = getattr(model, "cls_token", None) is not None
        if isinstance(model, ResNet):
            return
        for i, block in enumerate(self.blocks):
            attn = getattr(block, "attn", None)
            if not hasattr(attn, "attn_drop"):
                raise ValueError(
                    f"capture cannot take this {type(model).__name__}: its block {i}, a {type(block).__name__}, has no "
                    "attention `.attn` with an `attn_drop`, where the probabilities are read"
                )
            if type(attn).__name__ == "DiffAttention":  # twice as many softmaxes as heads pass its attn_drop
                raise ValueError(
                    f"capture cannot take this {type(model).__name__}: the maps of DiffAttention (block {i}) are "
                    "differences of two softmaxes, not probabilities"
                )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns that a map covers: the image's patches (ViT), or one window (Swin, where all are alike)."""
        kind = type(self.model).__name__
        if isinstance(self.model, ResNet):
            raise ValueError(f"a {kind} has no tokens: no grid, and no attention maps to measure")
        if isinstance(self.model, VITS):
            return tuple(self.model.patch_embed.grid_size)
        windows = {tuple(block.window_size) for block in self.blocks}
        if len(windows) > 1:
            raise ValueError(
                f"this {kind} has windows of several sizes, {sorted(windows, reverse=True)}, for a window shrinks to a "
                "smaller feature map. Take a larger image or a smaller window, or measure block by block"
            )
        (window,) = windows
        sizes = {tuple(block.input_resolution) for block in self.blocks}
        if padded := [size for size in sizes if any(side % w for side, w in zip(size, window, strict=True))]:
            raise ValueError(
                f"feature maps of {padded} are not whole windows of {window}: timm pads them, and the maps would cover "
                "places outside the image. Choose an image whose every stage is whole windows"
            )
        return window

    @contextmanager
    def _hooked(self, kept: dict[str, Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():  # run again on the way back, a layer would be without these hooks
                if getattr(module, "grad_checkpointing", False):
                    stack.callback(setattr, module, "grad_checkpointing", True)
                    module.grad_checkpointing = False

            def keep_output(module: nn.Module, name: str, change=lambda t: t):
                handle = module.register_forward_hook(lambda _, args, out: kept.__setitem__(name, change(out)))
                stack.callback(handle.remove)

            def keep_input(module: nn.Module, name: str):
                handle = module.register_forward_pre_hook(lambda _, args: kept.__setitem__(name, args[0]))
                stack.callback(handle.remove)

            keep_input(self.blocks[0], "stem" if isinstance(self.model, ResNet) else "embed")
            for i, block in enumerate(self.blocks):
                keep_output(block, f"block{i}.out")
                if isinstance(block, timm_vit.Block | EvaBlock):
                    keep_input(block.norm2, f"block{i}.mid")
                if hasattr(block, "attn"):
                    keep_output(block.attn.attn_drop, f"block{i}.attn", Tensor.float)
                    if getattr(block.attn, "fused_attn", False):  # the fused kernel never shows its probabilities
                        stack.callback(setattr, block.attn, "fused_attn", True)
                        block.attn.fused_attn = False
            yield

    def __call__(self, x: Tensor, capture: bool = True) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Normalised images [B,3,rows,columns] → (logits [B,K], intermediates); with ``capture=False``, logits."""
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"images are {x.dtype} {list(x.shape)}; normalised floats [B, 3, rows, columns] are needed, such as "
                "data.normalise(images, mean, std) gives"
            )
        if getattr(self.model, "dynamic_img_size", False):
            here, own = tuple(self.model.patch_embed.dynamic_feat_size(tuple(x.shape[-2:]))), self.grid
            if here != own and here[0] * here[1] == own[0] * own[1]:
                raise ValueError(
                    f"images of {here[0]} × {here[1]} patches, as many as the model's {own[0]} × {own[1]}: a measure "
                    f"would take one for the other. Tell the model: set_input_size(img_size={tuple(x.shape[-2:])})"
                )
        modes = [(module, module.training) for module in self.model.modules()]
        kept: dict[str, Tensor] = {}
        try:
            self.model.eval()
            if not capture:
                return self.model(x)
            with self._hooked(kept):
                logits = self.model(x)
        finally:
            for module, mode in modes:  # one by one: a part may have been frozen in another mode than the whole
                module.training = mode
        for i, block in enumerate(self.blocks):
            if hasattr(block, "attn") and f"block{i}.attn" not in kept:
                raise ValueError(f"block {i}: {type(block.attn).__name__} passed no probabilities through attn_drop")
        return logits, kept


def capture(timm_model: nn.Module) -> Captured:
    """timm's ViTs (also those that ``from_timm`` refuses), Swin and ResNet as ``x -> (logits, intermediates)``.

    ``measure_heads(capture(model), images)`` then measures the model as it is; nothing is copied. Taken: timm's
    ``VisionTransformer`` and ``Eva`` (EVA, DINOv3 and other ViTs with rotary positions) and classes derived from them
    whose blocks have an ``attn`` with ``attn_drop``, ``SwinTransformer`` and ``ResNet``; others raise ``ValueError`` by
    name.
    """
    return Captured(timm_model)


def _frozen(value: Any) -> Any:
    """``value`` with lists turned into tuples: hashable, and the same after a journey through JSON."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"option value {value!r} is not JSON; use numbers, strings, booleans, None and lists of them")


@dataclass(frozen=True)
class TimmConfig:
    """A timm model as pure data: ``TimmConfig("resnet18", image=32, options={"channels": (16, 32, 64, 128)})``."""

    name: str  # as in timm.list_models()
    image: int | None = None  # side in pixels; None: timm's own for this model
    classes: int = 100  # K
    options: tuple[tuple[str, Any], ...] = ()  # for timm.create_model; a mapping or pairs, kept as sorted pairs

    def __post_init__(self):
        if not timm.is_model(self.name):
            close = get_close_matches(self.name, timm.list_models(), n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
            raise ValueError(f"timm has no model {self.name!r}; {hint}")
        if self.classes < 0 or (self.image is not None and self.image < 1):
            raise ValueError(f"classes={self.classes}, image={self.image}: classes ≥ 0 and image ≥ 1 are needed")
        pairs = sorted((key, _frozen(value)) for key, value in dict(self.options).items())
        if taken := {"pretrained", "num_classes", "img_size"} & {key for key, _ in pairs}:
            raise ValueError(f"options hold {sorted(taken)}: weights are trained here; classes and image are fields")
        object.__setattr__(self, "options", tuple(pairs))

    def build(self) -> nn.Module:
        """The model with fresh weights."""
        options = dict(self.options)
        # timm marks with fixed_input_size the models built for one image size; the others have no such argument.
        if self.image is not None and getattr(timm.get_pretrained_cfg(self.name), "fixed_input_size", False):
            options["img_size"] = self.image
        return timm.create_model(self.name, pretrained=False, num_classes=self.classes, **options)

    def flops(self) -> int:
        """Floating-point operations of one image's forward pass: 2 per multiply-add, convolutions and products."""
        model = self.build().eval()
        shape = (3, self.image, self.image) if self.image is not None else model.default_cfg["input_size"]
        # On the meta device nothing is computed, only counted.
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.to("meta")(torch.empty(1, *shape, device="meta"))
        return counter.get_total_flops()
