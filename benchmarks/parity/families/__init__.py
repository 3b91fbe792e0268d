"""The families, in the order of the table; a module is imported when its family is used."""

from __future__ import annotations

import importlib
from types import ModuleType

from benchmarks.parity.family import Family

FAMILIES = (
    *("resnet", "mobilenet", "bert", "transformer", "gnmt", "mlstm", "gpt", "ncf", "ssd", "mask_rcnn", "retinanet"),
    *("unet", "gan", "deepspeech", "jasper", "tacotron", "waveglow", "rossmann", "sentiment", "graph"),
    "ppo",
)


def module(name: str) -> ModuleType:
    """The module of a family.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; choose from {', '.join(FAMILIES)}.")
    return importlib.import_module(f"{__name__}.{name}")


def get(name: str) -> Family:
    """A family by the name of its module.

    Raises:
        ValueError: There is none of that name.
    """
    family: Family = module(name).FAMILY
    return family
