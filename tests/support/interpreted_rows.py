"""The tests of rows with the device code in the place of the definitions, by Triton's interpreter: no GPU is needed.

Run as a module with TRITON_INTERPRET=1, which Triton looks at when it is imported.
"""

from itertools import product

import torch

from tests.unit.kernels import test_rows as tests
from titanlite.kernels.device import rows as device


def main() -> None:
    launched: list[str] = []

    def counted(name: str, launch):
        def run(*arguments, **more):
            launched.append(name)
            return launch(*arguments, **more)

        return run

    tests.take_rows = counted("take", lambda *of: device.launch_move(*of, True))
    tests.put_rows = counted("put", lambda *of: device.launch_move(*of, False))
    tests.momentum_rows = counted("momentum", device.launch_momentum)
    tests.update_rows = counted("update", device.launch_update)
    tests.NARROW = torch.float16  # the interpreter cuts what it rounds to bfloat16
    for widths in tests.WIDTHS:
        for nesterov, dtype in product((True, False), (torch.float32, torch.bfloat16)):
            tests.test_momentum(nesterov, dtype, widths, "cpu")
        tests.test_update(widths, "cpu")
        tests.test_rows_are_taken_and_put_back(widths, "cpu")
    assert {name: launched.count(name) for name in launched} == {"momentum": 16, "update": 8, "take": 2, "put": 2}


if __name__ == "__main__":
    main()
