"""`python -m mpjax parity examples.speech.parity:make`: half precision against float32, over seeds."""

from examples.common.parity import Maker
from examples.speech.config import Config
from examples.speech.modes import TaskMaker

make = Maker(Config, TaskMaker)
