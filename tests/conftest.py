"""One thread per process: ranks are forked after `import torch`, and a thread pool does not survive a fork."""

import torch

torch.set_num_threads(1)
