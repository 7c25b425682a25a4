"""The operations that surround the matmuls of a transformer, one stem each.

A file holds the definition in plain torch, which runs on every device and which `torch.compile` fuses. Blocks call
these functions, so that an operation can get device code of its own without a change of any model.
"""
