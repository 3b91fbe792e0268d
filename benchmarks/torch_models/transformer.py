"""`benchmarks.models.bert` and `gpt` in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """As `benchmarks.models.transformer.Block`; attention is PyTorch's own, fused where it can be."""

    def __init__(self, features: int, heads: int, pre_norm: bool):
        super().__init__()
        self.heads, self.pre_norm = heads, pre_norm
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)
        self.mlp = nn.Sequential(
            nn.Linear(features, 4 * features), nn.GELU(approximate="tanh"), nn.Linear(4 * features, features)
        )
        self.attention_norm, self.mlp_norm = nn.LayerNorm(features), nn.LayerNorm(features)

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, features = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, features // self.heads).unbind(2)
        heads = (a.transpose(1, 2) for a in (q, k, v))
        y = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=self.pre_norm)
        return self.out(y.transpose(1, 2).reshape(batch, length, features))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.pre_norm:
            x = x + self.attend(self.attention_norm(x), mask)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attend(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class Embeddings(nn.Module):
    def __init__(self, workload: Any):
        super().__init__()
        self.tokens = nn.Embedding(workload.vocabulary, workload.features)
        self.positions = nn.Embedding(workload.length, workload.features)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=workload.features**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Bert(nn.Module):
    def __init__(self, workload: Any):
        super().__init__()
        features = workload.features
        self.embeddings = Embeddings(workload)
        self.segments = nn.Embedding(2, features)
        self.embedding_norm = nn.LayerNorm(features)
        self.blocks = nn.ModuleList(Block(features, workload.heads, False) for _ in range(workload.layers))
        self.pooler, self.nsp = nn.Linear(features, features), nn.Linear(features, 2)
        self.mlm = nn.Sequential(nn.Linear(features, features), nn.GELU(approximate="tanh"), nn.LayerNorm(features))
        self.mlm_bias = nn.Parameter(torch.zeros(workload.vocabulary))

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding_norm(self.embeddings(tokens) + self.segments(segments))
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        masked = torch.take_along_dim(x, positions[..., None], 1)
        logits = functional.linear(self.mlm(masked), self.embeddings.tokens.weight, self.mlm_bias)
        return logits, self.nsp(torch.tanh(self.pooler(x[:, 0])))


def bert_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens, is_next = module(batch["tokens"], batch["segments"], batch["lengths"], batch["positions"])
    masked = functional.cross_entropy(tokens.flatten(0, 1), batch["masked_tokens"].flatten())
    return masked + functional.cross_entropy(is_next, batch["is_next"])


class Gpt(nn.Module):
    def __init__(self, workload: Any):
        super().__init__()
        self.embeddings = Embeddings(workload)
        self.blocks = nn.Sequential(*(Block(workload.features, workload.heads, True) for _ in range(workload.layers)))
        self.final_norm = nn.LayerNorm(workload.features)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.final_norm(self.blocks(self.embeddings(tokens)))
        return functional.linear(x, self.embeddings.tokens.weight)


def gpt_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
