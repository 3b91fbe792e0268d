"""`python -m mpjax parity examples.imagenet.parity:make`: compares half precision with float32 over several seeds."""

from examples.common.parity import Maker
from examples.imagenet.config import Config
from examples.imagenet.modes import TaskMaker

make = Maker(Config, TaskMaker)
