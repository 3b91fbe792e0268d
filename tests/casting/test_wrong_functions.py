"""What autocast can't wrap is refused where it is given, with the way out."""

import haiku as hk
import jax.numpy as jnp
import jmp
import pytest

import mpjax


def generator(x):
    yield x @ x


async def coroutine(x):
    return x @ x


class Net:
    def __call__(self, x):
        return x @ x


WRONG = {
    "the function comes first, autocast.loss_fn, 'mixed_float16'.*no context manager": ("mixed_float16", jnp.dot),
    "the function comes first": (jmp.get_policy("half"),),
    "runs nothing of it": (generator,),
    "coroutine": (coroutine,),
    r"autocast\(Net\): a call of a class only makes an object. Put autocast on a method": (Net,),
    "put @classmethod above": (classmethod(jnp.dot),),
    "give its apply": (hk.transform(lambda x: x),),
    "give the loss function itself": (jnp.ones(2),),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_not_a_function_of_arrays_is_refused(says):
    with pytest.raises(TypeError, match=says) as error:
        mpjax.autocast(*WRONG[says])
    assert "\n" not in str(error.value)
