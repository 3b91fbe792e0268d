"""`python -m mpjax parity examples.speech.parity:make`: compares half precision with float32 over several seeds."""

from examples.common.parity import Maker
from examples.speech.train import SpeechTask

make = Maker(SpeechTask)
