"""The operations of models and optimizers, one file each.

Each file defines its operation in plain torch, which runs on every device and which `torch.compile` can fuse. Models
call these functions, so that an operation can get a GPU kernel (`device/`) without a change to any model.
"""
