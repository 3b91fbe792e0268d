"""`benchmarks.models.resnet` in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _conv(features_in: int, features: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(features_in, features, size, stride, size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, features_in: int, features: int, stride: int):
        super().__init__()
        self.branch = nn.Sequential(
            _conv(features_in, features, 1),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
            _conv(features, features, 3, stride),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
            _conv(features, 4 * features, 1),
            nn.BatchNorm2d(4 * features),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or features_in != 4 * features:
            self.shortcut = nn.Sequential(_conv(features_in, 4 * features, 1, stride), nn.BatchNorm2d(4 * features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, side, side, 3], as the JAX model takes them, to logits."""

    def __init__(self, workload: Any):
        super().__init__()
        width = workload.width
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        features_in = width
        for stage, blocks in enumerate(workload.stages):
            features = width * 2**stage
            for index in range(blocks):
                layers.append(Bottleneck(features_in, features, 2 if stage > 0 and index == 0 else 1))
                features_in = 4 * features
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(features_in, workload.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # A view: in memory it is channels last already.
        return self.head(self.body(images.permute(0, 3, 1, 2)).mean((2, 3)))


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(module(batch["images"]), batch["labels"])
