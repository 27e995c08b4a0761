"""Ready for a GPU, tested without one: a step asks the device for no value, evaluation never for a batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tiny_runs import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitbook.data import Augment, ImageSet, load
from vitbook.data.mixing import CUTS
from vitbook.runs import training

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
LOOKS = ("nonzero", "unique", "masked_select", "argwhere", "equal", "allclose")  # their size or answer is a value


class OnDevice(Tensor):
    """A tensor that stands for one on a GPU: it and all that is computed from it note who asks for their values."""

    asked: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        masked = name == "__getitem__" and getattr(args[1], "dtype", None) is torch.bool
        if name in READS + LOOKS or masked or (name == "to" and "cpu" in map(str, args[1:])):
            cls.asked.append((name, args[0].numel()))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def asked() -> list[tuple[str, int]]:
    OnDevice.asked.clear()
    return OnDevice.asked


def on_device(data: ImageSet) -> ImageSet:
    return replace(data, images=data.images.as_subclass(OnDevice), labels=data.labels.as_subclass(OnDevice))


def test_the_stand_in_notices(asked):
    x = (torch.arange(4.0).as_subclass(OnDevice) * 2)[1:]
    for look in (
        lambda: x.sum().item(), x.tolist, x.cpu, x.numpy, lambda: bool(x[0]), lambda: float(x.mean()), x.nonzero,
        lambda: x[x > 1], lambda: x.to("cpu"), lambda: torch.equal(x, x), lambda: int(x.sum()), lambda: len(x.unique()),
    ):  # fmt: skip
        before = len(asked)
        look()
        assert len(asked) > before
    before = len(asked)
    (x @ x).softmax(0), x.to(torch.float64), x[[0, 1]]
    assert len(asked) == before


@pytest.mark.parametrize("augment", [
    Augment(),
    Augment(policy="cifar10", jitter=0.4),
    Augment(mixup=0.8, cutmix=1.0, smoothing=0.1),
    Augment(mixup=0.8, cutmix=1.0, per_image=True),
    *(Augment(cutmix=1.0, cut=kind) for kind in CUTS[1:]),
], ids=str)  # fmt: skip
def test_augmentation_asks_for_nothing(augment, asked):
    batches = list(augment.epoch(on_device(load("shapes", "test")), 50))
    assert len(batches) == 10 and all(type(part) is OnDevice for batch in batches for part in batch)
    assert asked == []


def test_evaluation_asks_for_results_only(asked):
    """Single values, and the table of the heads: a layer at a time, 9 sums of 2 heads."""
    run, data = tiny(), on_device(load("shapes", "test"))
    row = training.evaluate(run, training.half(run.model.build()), data, data)
    assert row["heads"] and {size for _, size in asked} == {1, 18}


class Values(TorchDispatchMode):
    """Notes every operation that hands a value of a tensor to Python, whoever calls it, the optimiser included."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            self.handed.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_asks_for_nothing(fused, monkeypatch):
    """From the first batch of an epoch to the last step's end: forward, loss, backward, clipping, update."""
    seen, whole = [], Augment.epoch

    def epoch(self, *arguments) -> Iterator:
        with Values() as values:
            yield from whole(self, *arguments)
        seen.append(values.handed)

    monkeypatch.setattr(Augment, "epoch", epoch)
    if not fused:  # the step that PyTorch takes by default does ask: the net holds
        adamw = torch.optim.AdamW
        monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: adamw(*a, **(k | {"fused": False})))
    plain = {"crop": 4, "flip": True, "cutmix": 0.0}  # mixing draws numbers on the host, which is no look at the device
    changes = {f"recipe.augment.{name}": value for name, value in plain.items()} | {"recipe.clip": 1.0}
    training.fit(tiny(changes=changes))
    assert len(seen) == 3 and all(bool(handed) != fused for handed in seen)
