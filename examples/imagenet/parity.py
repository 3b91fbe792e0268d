"""`python -m mpjax parity examples.imagenet.parity:make`: half precision against float32, over seeds."""

from examples.common.parity import Maker
from examples.imagenet.config import Config
from examples.imagenet.modes import TaskMaker

make = Maker(Config, TaskMaker)
