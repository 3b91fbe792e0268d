"""The model given by the flags. Its code does not mention precision: `mpjax.with_policy` sets it from outside."""

from __future__ import annotations

from flax import nnx

from examples.speech.config import Config
from examples.speech.deepspeech import DeepSpeech
from examples.speech.deepspeech2 import DeepSpeech2


def create_model(config: Config, labels: int, rngs: nnx.Rngs) -> DeepSpeech | DeepSpeech2:
    """Creates the model given by the flags, with `labels` outputs per frame."""
    sizes = (config.front_end.size, labels, config.hidden)
    names = {"deepspeech": ("context", "layer_norm"), "deepspeech2": ("layers", "channels", "lookahead")}
    names_of_both = ("stride", "cell", "bidirectional", "dropout")
    chosen = {name: getattr(config, name) for name in (*names_of_both, *names[config.model])}
    return (DeepSpeech if config.model == "deepspeech" else DeepSpeech2)(*sizes, **chosen, rngs=rngs)
