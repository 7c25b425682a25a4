"""Train a model from a TOML file: parse, build, run; nothing else.

    torchrun --nproc-per-node 8 -m titanlite.train --config llama3_8b.toml --parallelism.tensor_parallel_degree 4

In a checkout, `train.py` does the same. Mistakes in keys and values are found in a second, before torch is imported,
unless `optimizer.file` is set. Mistakes in a user's Python file are found before anything is written or prepared.
"""

import os
import sys

from titanlite.checkpoint.disk_space import lack_of_disk_space
from titanlite.checkpoint.optimizer_state import leaves_state
from titanlite.checkpoint.resume import step_to_resume
from titanlite.config.config_json import KEY
from titanlite.errors import ConfigError
from titanlite.exit_code import exit_code, leave
from titanlite.hub import fetch_weights, is_hub_name
from titanlite.preflight.checked_run import VERBOSE, checked_run, resumes
from titanlite.preflight.hints import no_login
from titanlite.preflight.host_memory import lack_of_memory
from titanlite.preflight.launcher import Launcher, check_launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.start import check_start, newest_state
from titanlite.streams import say_first


def main() -> None:
    """Check the config and all that it names, claim the run's folder, and train."""
    check_launcher()
    launcher = Launcher()  # before the checks, during which the launcher may end
    world = int(os.environ.get("WORLD_SIZE", "1"))
    run = checked_run([word for word in sys.argv[1:] if word != VERBOSE], world, is_start=True)
    say_first("loading torch, assembling the model")
    is_first = os.environ.get("RANK", "0") == "0"
    folder = RunFolder.of(run.config)
    if is_first:
        check_start(run.config, run.inputs)
    if not resumes(run.config) and is_hub_name(path := run.config.checkpoint.initial_load_path):
        fetch_weights(path, KEY)
    if run.config.model.file:
        # Importing the file may initialise CUDA, which must happen on this process's GPU.
        from titanlite.parallel.process_group import choose_device

        choose_device()
    from titanlite.training.assemble import try_assembly  # imports torch, which a user's file may have done before

    foreseen = try_assembly(run, world)
    if lack := lack_of_memory(run.config, foreseen.trained, world, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(lack)
    if (found := newest_state(run.config)) is not None:  # refuse the state of another optimizer
        leaves_state(*found, run.config.optimizer, foreseen.rules, run.optimizer.own_rules)
    notices, warnings = [*run.hints], [*run.warnings]
    if is_first:
        notices += folder.claim(run.config)
        if run.config.checkpoint.enable:
            step_to_resume(folder.checkpoints, run.config.checkpoint.resume)  # claimed: no other job writes there
            lack = lack_of_disk_space(folder.checkpoints, run.config, foreseen.saved)
            warnings += [lack] if lack else []
        warnings += filter(None, [no_login(run.config), foreseen.warning])

    from titanlite.training.train import train

    watched = launcher if run.config.job.stop_with_launcher else None
    train(run, folder, notices, warnings, watched, is_verbose=VERBOSE in sys.argv)


if __name__ == "__main__":
    leave(exit_code(main))
