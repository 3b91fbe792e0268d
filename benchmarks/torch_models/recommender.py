"""`benchmarks.models.ncf` in PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class NeuMF(nn.Module):
    def __init__(self, workload: Any):
        super().__init__()
        widths, half = workload.widths, workload.widths[0] // 2
        self.user_factors = nn.Embedding(workload.users, workload.factors)
        self.item_factors = nn.Embedding(workload.items, workload.factors)
        self.user, self.item = nn.Embedding(workload.users, half), nn.Embedding(workload.items, half)
        layers: list[nn.Module] = []
        for width_in, width in itertools.pairwise(widths):
            layers += [nn.Linear(width_in, width), nn.ReLU(inplace=True)]
        self.mlp = nn.Sequential(*layers)
        self.head = nn.Linear(workload.factors + widths[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        factors = self.user_factors(users) * self.item_factors(items)
        mlp = self.mlp(torch.cat([self.user(users), self.item(items)], -1))
        return self.head(torch.cat([factors.to(mlp.dtype), mlp], -1))[:, 0]


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["users"], batch["items"])
    return functional.binary_cross_entropy_with_logits(logits.float(), batch["likes"])
