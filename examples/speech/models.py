"""The model that the flags ask for. Nothing in it is about precision: `mpjax.with_policy` decides that from outside."""

from __future__ import annotations

from flax import nnx

from examples.speech.config import Config
from examples.speech.deepspeech import DeepSpeech
from examples.speech.deepspeech2 import DeepSpeech2


def create_model(config: Config, labels: int, rngs: nnx.Rngs) -> DeepSpeech | DeepSpeech2:
    """The model of the flags, with `labels` outputs a frame."""
    if config.model == "deepspeech":
        return DeepSpeech(
            config.front_end.size,
            labels,
            config.hidden,
            context=config.context,
            stride=config.stride,
            cell=config.cell,
            bidirectional=config.bidirectional,
            layer_norm=config.layer_norm,
            dropout=config.dropout,
            rngs=rngs,
        )
    return DeepSpeech2(
        config.front_end.size,
        labels,
        config.hidden,
        layers=config.layers,
        channels=config.channels,
        stride=config.stride,
        cell=config.cell,
        bidirectional=config.bidirectional,
        lookahead=config.lookahead,
        dropout=config.dropout,
        rngs=rngs,
    )
