"""`benchmarks.models.lstm` and `deep_speech` in PyTorch, whose recurrences are cuDNN's on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class LstmLanguageModel(nn.Module):
    def __init__(self, workload: Any):
        super().__init__()
        features = workload.features
        self.embedding = nn.Embedding(workload.vocabulary, features)
        self.lstm = nn.LSTM(features, features, workload.layers, batch_first=True)
        self.head = nn.Linear(features, workload.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def lstm_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class DeepSpeech2(nn.Module):
    """Spectrograms [batch, frames, frequencies] to logits [batch, frames / 2, characters]."""

    def __init__(self, workload: Any):
        super().__init__()
        channels, features = workload.channels, workload.features
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (11, 41), (2, 2), (5, 20), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (11, 21), (1, 2), (5, 10), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        frequencies = math.ceil(math.ceil(workload.frequencies / 2) / 2)
        sizes = [channels * frequencies] + [features] * (workload.layers - 1)
        self.recurrences = nn.ModuleList(nn.GRU(size, features, batch_first=True, bidirectional=True) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(features) for _ in sizes)
        self.head = nn.Linear(features, workload.characters)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrograms[:, None])
        x = x.permute(0, 2, 3, 1).flatten(2)
        for recurrence, norm in zip(self.recurrences, self.norms, strict=True):
            forward, backward = recurrence(x)[0].chunk(2, -1)
            x = norm((forward + backward).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


def speech_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    log_probs = functional.log_softmax(module(batch["spectrograms"]).float(), -1).transpose(0, 1)
    lengths = torch.full_like(batch["label_lengths"], log_probs.shape[0])
    # PyTorch's mean divides by the label's length, optax's loss does not.
    summed = functional.ctc_loss(log_probs, batch["labels"], lengths, batch["label_lengths"], reduction="sum")
    return summed / len(lengths)
