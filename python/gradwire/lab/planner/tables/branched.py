"""Networks with branches: GoogLeNet and ResNet."""

from __future__ import annotations

from gradwire.lab.planner.tables.network import Layer
from gradwire.lab.planner.tables.shapes import Shapes

# Filters of 1×1, 3×3 after its reduction, 5×5 after its reduction, and the pool's projection.
_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet() -> list[Layer]:
    """GoogLeNet (Szegedy et al. 2015, table 1), with the two classifiers that help its training."""
    net = Shapes(3, 224)
    net.conv("conv1", 64, 7, stride=2, pad=3)
    net.pool(3, 2, up=True)
    net.conv("conv2/reduce", 64, 1)
    net.conv("conv2", 192, 3, pad=1)
    net.pool(3, 2, up=True)
    for name, filters in _INCEPTIONS.items():
        if name in ("4a", "5a"):
            net.pool(3, 2, up=True)
        if name in ("4b", "4e"):
            _classifier(net, f"loss_before_{name}")
        _inception(net, f"inception_{name}", filters)
    net.average()
    net.linear("classifier", 1000)
    return net.layers


def _inception(net: Shapes, name: str, filters: tuple[int, ...]) -> None:
    one, three_reduce, three, five_reduce, five, projection = filters
    before = net.shape
    net.conv(f"{name}/1x1", one, 1)
    net.shape = before
    net.conv(f"{name}/3x3_reduce", three_reduce, 1)
    net.conv(f"{name}/3x3", three, 3, pad=1)
    net.shape = before
    net.conv(f"{name}/5x5_reduce", five_reduce, 1)
    net.conv(f"{name}/5x5", five, 5, pad=2)
    net.shape = before
    net.conv(f"{name}/pool_proj", projection, 1)
    net.shape = (one + three + five + projection, *before[1:])


def _classifier(net: Shapes, name: str) -> None:
    before = net.shape
    net.pool(5, 3)
    net.conv(f"{name}/conv", 128, 1)
    net.linear(f"{name}/fc", 1024)
    net.linear(f"{name}/classifier", 1000)
    net.shape = before


def resnet18() -> list[Layer]:
    """ResNet-18 (He et al. 2016, table 1)."""
    return _resnet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> list[Layer]:
    """ResNet-50 (He et al. 2016, table 1), strides at the 3×3 convolutions."""
    return _resnet((3, 4, 6, 3), bottleneck=True)


def resnet152() -> list[Layer]:
    """ResNet-152 (He et al. 2016, table 1), strides at the 3×3 convolutions."""
    return _resnet((3, 8, 36, 3), bottleneck=True)


def _resnet(depths: tuple[int, ...], *, bottleneck: bool) -> list[Layer]:
    net = Shapes(3, 224)
    _conv_norm(net, "conv1", 64, 7, stride=2)
    net.pool(3, 2, pad=1)
    block = _bottleneck if bottleneck else _basic
    for stage, depth in enumerate(depths):
        for index in range(depth):
            name = f"layer{stage + 1}.{index}"
            block(net, name, 64 << stage, stride=2 if stage > 0 and index == 0 else 1)
    net.average()
    net.linear("fc", 1000)
    return net.layers


def _conv_norm(net: Shapes, name: str, filters: int, size: int, *, stride: int = 1) -> None:
    net.conv(name, filters, size, stride=stride, pad=size // 2, bias=False)
    net.norm(f"{name}.norm")


def _bottleneck(net: Shapes, name: str, width: int, *, stride: int) -> None:
    before = net.shape
    _conv_norm(net, f"{name}.conv1", width, 1)
    _conv_norm(net, f"{name}.conv2", width, 3, stride=stride)
    _conv_norm(net, f"{name}.conv3", 4 * width, 1)
    _shortcut(net, name, before, stride)


def _basic(net: Shapes, name: str, width: int, *, stride: int) -> None:
    before = net.shape
    _conv_norm(net, f"{name}.conv1", width, 3, stride=stride)
    _conv_norm(net, f"{name}.conv2", width, 3)
    _shortcut(net, name, before, stride)


def _shortcut(net: Shapes, name: str, before: tuple[int, int, int], stride: int) -> None:
    after = net.shape
    if before[0] != after[0]:
        net.shape = before
        _conv_norm(net, f"{name}.downsample", after[0], 1, stride=stride)
