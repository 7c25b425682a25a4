"""Values of symmetric products by Triton's interpreter, against the definition: no GPU is needed.

In float16: the interpreter multiplies the bits of bfloat16 as integers.

Run as a module with TRITON_INTERPRET=1, which Triton looks at when it is imported.
"""

import torch

from titanlite.kernels.device import symmetric_product as device
from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.symmetric_product import symmetric_product

launched = 0


def interpret(kernel, key, blocks, tensors, arguments, **options) -> None:
    global launched
    launched += 1
    kernel[blocks](*(a.descriptor() if type(a) is Blocks else a for a in arguments()))


def main() -> None:
    device.launch = interpret
    generator = torch.Generator().manual_seed(0)
    for B, R, C in [(2, 300, 72), (2, 40, 136)]:
        places = torch.arange(R) // device.TILE
        mirrored = places[:, None] != places[None, :]  # what numpy multiplies within a tile is symmetric up to rounding
        x = torch.randn(B, R, C, generator=generator).half()
        d = torch.randn(B, R, R, generator=generator)
        d = (d + d.mT).half()
        for added in (None, d):
            ours = device.launch_symmetric_product(x, x, added, 1.5, -2.5, 3.0)
            wide = None if added is None else added.double()
            truth = symmetric_product(x.double(), added=wide, alpha=1.5, beta=-2.5, diagonal=3.0)
            # Rounded to half a unit of float16; sums of products to float32, each relative to the sum of their sizes.
            sizes = (
                3 + 1.5 * (x.double().abs() @ x.double().abs().mT) + (0 if added is None else 2.5 * d.double().abs())
            )
            allowed = truth.abs() * 2**-11 + 2**-25 + sizes * (C + 4) * 2**-24
            assert ((ours.double() - truth).abs() <= allowed).all(), (B, R, C, added is None)
            assert torch.equal(ours[:, mirrored], ours.mT[:, mirrored])
        above = torch.where(places[:, None] < places[None, :], torch.nan, d.float()).half()
        ours = device.launch_symmetric_product(x, x, above, 1.0, 1.0, 0.0)
        assert ours.isfinite().all()  # tiles of it above the diagonal were not read
    assert launched == 6, launched


if __name__ == "__main__":
    main()
