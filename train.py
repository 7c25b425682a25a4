"""Train a model from a TOML file; `titanlite/train.py` under a shorter name.

torchrun --nproc-per-node 8 train.py --config configs/llama3_8b.toml --parallelism.tensor_parallel_degree 4
"""

from titanlite.exit_code import exit_code, leave
from titanlite.train import main

if __name__ == "__main__":
    leave(exit_code(main))
