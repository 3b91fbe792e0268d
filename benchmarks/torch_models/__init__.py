"""The models of `benchmarks.models` in plain PyTorch: the same layers and sizes, on the same batches.

`MODELS` maps each class of workload to its module and loss: `build(workload)` and `loss(module, batch)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.models import bert, deep_speech, gpt, lstm, ncf, resnet

from . import recommender, recurrent, residual, transformer


@dataclasses.dataclass(frozen=True)
class TorchModel:
    """A workload in PyTorch; `channels_last` for convolutions in half."""

    build: Callable[[Any], Any]
    loss: Callable[[Any, dict[str, Any]], Any]
    channels_last: bool = False


MODELS = {
    resnet.ResNet50: TorchModel(residual.ResNet, residual.loss, channels_last=True),
    bert.Bert: TorchModel(transformer.Bert, transformer.bert_loss),
    gpt.Gpt: TorchModel(transformer.Gpt, transformer.gpt_loss),
    lstm.Lstm: TorchModel(recurrent.LstmLanguageModel, recurrent.lstm_loss),
    deep_speech.Speech: TorchModel(recurrent.DeepSpeech2, recurrent.speech_loss, channels_last=True),
    ncf.Ncf: TorchModel(recommender.NeuMF, recommender.loss),
}
