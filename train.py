"""Train a model from a TOML file: parse, build, run; nothing else.

    torchrun --nproc-per-node 8 train.py --config configs/llama3_8b.toml --parallelism.tensor_parallel_degree 4

Whatever can be wrong with the input is found before torch is imported, so a mistake costs a second.
"""

import os
import sys
from pathlib import Path

from titanlite.commands.validate import checked_run
from titanlite.config.write import to_toml
from titanlite.exit_code import exit_code
from titanlite.run_folder import RunFolder


def main() -> None:
    """Check everything, claim the run's folder, train."""
    run = checked_run(sys.argv[1:], world_size=int(os.environ.get("WORLD_SIZE", "1")))
    folder = RunFolder(Path(run.config.job.dump_folder) / run.config.job.name)
    notices = folder.claim(run.config, to_toml(run.config)) if os.environ.get("RANK", "0") == "0" else []

    from titanlite.training.train import train  # torch is imported here, not before

    train(run.config, run.dimensions, run.save_list, run.float8, folder, notices)


if __name__ == "__main__":
    sys.exit(exit_code(main))
