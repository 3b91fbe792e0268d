"""`python -m mpjax parity examples.imagenet.parity:make`: compares half precision with float32 over several seeds."""

from examples.common.parity import Maker
from examples.imagenet.train import ImageTask

make = Maker(ImageTask)
