"""`python -m mpjax parity examples.speech.parity:make`: compares half precision with float32 over several seeds."""

from examples.common.parity import Maker
from examples.speech.config import Config
from examples.speech.modes import TaskMaker

make = Maker(Config, TaskMaker)
