"""The families, in the order of the table, in a module for each kind of training."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from benchmarks.parity.family import Family

_OF_KIND = {
    "images": "resnet mobilenet unet",
    "detection": "ssd mask_rcnn retinanet",
    "translation": "transformer gnmt",
    "language": "bert mlstm gpt",
    "tables": "ncf rossmann sentiment graph",
    "spoken": "deepspeech jasper tacotron waveglow",
    "adversarial": "gan",
    "reinforcement": "ppo",
}
_KIND = {name: kind for kind, names in _OF_KIND.items() for name in names.split()}
FAMILIES = (
    *("resnet", "mobilenet", "bert", "transformer", "gnmt", "mlstm", "gpt", "ncf", "ssd", "mask_rcnn", "retinanet"),
    *("unet", "gan", "deepspeech", "jasper", "tacotron", "waveglow", "rossmann", "sentiment", "graph"),
    "ppo",
)


def module(name: str) -> ModuleType:
    """The module of a family, imported when it is used.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; choose from {', '.join(FAMILIES)}.")
    return importlib.import_module(f"{__name__}.{_KIND[name]}")


@functools.cache
def get(name: str) -> Family:
    """A family by its name.

    Raises:
        ValueError: There is none of that name.
    """
    family: Family = getattr(module(name), name)()
    return family
