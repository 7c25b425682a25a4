"""The tests of scaled copies with the device code in the place of the definition, by Triton's interpreter: no GPU.

Run as a module with TRITON_INTERPRET=1, which Triton looks at when it is imported.
"""

from itertools import product

import torch

from tests.unit.kernels import test_scaled_copy as tests
from titanlite.kernels.device import scaled_copy as device

launched = 0


def interpret(kernel, key, blocks, tensors, arguments, **options) -> None:
    global launched
    launched += 1
    kernel[blocks](*arguments())


def main() -> None:
    device.launch = interpret
    tests.scaled_copy = lambda x, out, factor, norm=None, eps=0.0: device.launch_scaled_copy(x, out, factor, norm, eps)
    tests.BACK = torch.float16  # the interpreter cuts what it rounds to bfloat16
    for shape, transposed in product(tests.SHAPES, tests.TRANSPOSED):
        tests.test_there_and_back(shape, transposed, "cpu")
    tests.test_in_place("cpu")
    tests.test_norms_of_zero_and_of_what_is_no_number("cpu")
    assert launched == 8 * len(tests.SHAPES) * len(tests.TRANSPOSED) + 3, launched


if __name__ == "__main__":
    main()
