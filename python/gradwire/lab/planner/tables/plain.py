"""Networks whose layers follow each other: AlexNet, VGG, and Network in Network."""

from __future__ import annotations

from gradwire.lab.planner.tables.network import Layer
from gradwire.lab.planner.tables.shapes import Shapes


def alexnet() -> list[Layer]:
    """AlexNet (Krizhevsky et al. 2012), without its two groups, as in FireCaffe's table 1."""
    net = Shapes(3, 224)
    net.conv("conv1", 96, 11, stride=4, pad=2)
    net.pool(3, 2)
    net.conv("conv2", 256, 5, pad=2)
    net.pool(3, 2)
    for name, filters in (("conv3", 384), ("conv4", 384), ("conv5", 256)):
        net.conv(name, filters, 3, pad=1)
    net.pool(3, 2)
    for name, outputs in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, outputs)
    return net.layers


def vgg16() -> list[Layer]:
    """VGG-16 (Simonyan & Zisserman 2015, configuration D)."""
    return _vgg((2, 2, 3, 3, 3))


def vgg19() -> list[Layer]:
    """VGG-19 (Simonyan & Zisserman 2015, configuration E)."""
    return _vgg((2, 2, 4, 4, 4))


def _vgg(depths: tuple[int, ...]) -> list[Layer]:
    net = Shapes(3, 224)
    for block, (depth, filters) in enumerate(zip(depths, (64, 128, 256, 512, 512), strict=True), 1):
        for index in range(1, depth + 1):
            net.conv(f"conv{block}_{index}", filters, 3, pad=1)
        net.pool(2, 2)
    for name, outputs in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, outputs)
    return net.layers


def nin() -> list[Layer]:
    """Network in Network for ImageNet (Lin et al. 2014; the authors' Caffe model)."""
    net = Shapes(3, 224)
    net.conv("conv1", 96, 11, stride=4)
    net.conv("cccp1", 96, 1)
    net.conv("cccp2", 96, 1)
    net.pool(3, 2, up=True)
    net.conv("conv2", 256, 5, pad=2)
    net.conv("cccp3", 256, 1)
    net.conv("cccp4", 256, 1)
    net.pool(3, 2, up=True)
    net.conv("conv3", 384, 3, pad=1)
    net.conv("cccp5", 384, 1)
    net.conv("cccp6", 384, 1)
    net.pool(3, 2, up=True)
    net.conv("conv4", 1024, 3, pad=1)
    net.conv("cccp7", 1024, 1)
    net.conv("cccp8", 1000, 1)
    return net.layers
