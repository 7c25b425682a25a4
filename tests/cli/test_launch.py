"""The scripts of scripts/launch, run with stand-ins for what a cluster has: what they start, and what they pass on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.support.needs import slow

REPOSITORY = Path(__file__).parents[2]
DEBUG = str(REPOSITORY / "configs" / "debug.toml")
TWO_HOSTS, SLURM = (str(REPOSITORY / "scripts" / "launch" / name) for name in ("two_hosts.sh", "slurm.sbatch"))
# Records its arguments and what of the environment and the signals it was given matters, and ends as it is told.
RECORD = """
import json, os, sys
name = os.path.basename(sys.argv[0])
torch = {key: value for key, value in os.environ.items() if key.startswith("TORCH_")}
given = {"args": sys.argv[1:], "folder": os.getcwd(), "torch": torch}
open(os.path.join(os.environ["RECORDS"], name + ".json"), "w").write(json.dumps(given))
"""
STAND_INS = {
    "torchrun": RECORD + 'sys.exit(int(os.environ["TORCHRUN_ENDS_WITH"]))',
    "srun": RECORD + 'start = sys.argv.index("torchrun")\nos.execvp("torchrun", sys.argv[start:])',
    # More than a pipe holds: who closes it after the first line ends this program with SIGPIPE.
    "scontrol": RECORD + 'print("node7", *(f"node{n:06}" for n in range(20000)), sep="\\n")',
    "titanlite": "import sys\nfrom titanlite.commands import main\nsys.exit(main())",
}


@pytest.fixture
def cluster(tmp_path: Path):
    """Run one of the scripts with stand-ins on PATH; returns how it ended and what each stand-in was given."""
    programs, records, submitted = tmp_path / "bin", tmp_path / "records", tmp_path / "submitted from"
    for folder in (programs, records, submitted):
        folder.mkdir()
    for name, code in STAND_INS.items():
        (programs / name).write_text(f"#!{sys.executable}\n{code}\n")
        (programs / name).chmod(0o755)

    def start(script: str, *args: str, ends_with: int = 0, **environment: str):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCH", "NNODES", "NPROC"))}
        clean |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "RECORDS": str(records)}
        slurm = {"SUBMIT_DIR": str(submitted), "JOB_NODELIST": "node[7-9]", "JOB_NUM_NODES": "2", "JOB_ID": "42"}
        slurm |= {"CPUS_PER_TASK": "64", "GPUS_ON_NODE": "2"}
        if script == SLURM:
            clean |= {f"SLURM_{key}": value for key, value in slurm.items()}
        clean |= {"TORCHRUN_ENDS_WITH": str(ends_with)} | environment
        done = subprocess.run(
            ["bash", script, *args], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        given = {file.stem: json.loads(file.read_text()) for file in records.iterdir()}
        return done, given

    return start


def understood(args: list[str]) -> dict[str, object]:
    """What torchrun makes of its arguments."""
    from torch.distributed.run import get_args_parser

    return vars(get_args_parser().parse_args(args))


AT_WORK = "assembling the model for what only it can tell …\n"  # said by whoever waits for it
COMMON = {
    "rdzv_backend": "c10d",
    "max_restarts": 3,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "local_ranks_filter": "0",
    "training_script": "train.py",
}


def check_torch(given: dict[str, str], seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun makes of its environment. Before torch 2.12 it waits for 30 seconds, whatever that says."""
    assert given.keys() == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert getattr(config, "shutdown_timeout", seconds) == seconds


def test_two_hosts(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--config", DEBUG, "--job.name", "a run with blanks", "--training.steps=50"]
    done, given = cluster(TWO_HOSTS, "node1", *flags)
    assert (done.returncode, done.stdout, done.stderr.replace(AT_WORK, "")) == (0, "", "")
    assert given["torchrun"]["folder"] == str(REPOSITORY)
    check_torch(given["torchrun"]["torch"], 600, monkeypatch)
    wants = COMMON | {"nnodes": "2", "nproc_per_node": "gpu", "rdzv_endpoint": "node1:29500", "rdzv_id": "titanlite"}
    wants |= {"training_script_args": flags}
    found = understood(given["torchrun"]["args"])
    assert {key: found[key] for key in wants} == wants


def test_two_hosts_takes_the_numbers_of_hosts_and_processes(cluster) -> None:
    _, given = cluster(TWO_HOSTS, "localhost", "--config", DEBUG, NNODES="4", NPROC="1")
    found = understood(given["torchrun"]["args"])
    assert (found["nnodes"], found["nproc_per_node"]) == ("4", "1")


def test_slurm(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--config", DEBUG, "--job.name", "a run with blanks"]
    done, given = cluster(SLURM, *flags)
    assert (done.returncode, done.stdout, done.stderr.replace(AT_WORK, "")) == (0, "", "")
    assert given["scontrol"]["args"] == ["show", "hostnames", "node[7-9]"]
    assert given["srun"]["args"][:4] == ["--cpus-per-task", "64", "--kill-on-bad-exit=0", "torchrun"]
    assert given["torchrun"]["folder"].endswith("submitted from")
    check_torch(given["torchrun"]["torch"], 540, monkeypatch)
    wants = COMMON | {"nnodes": "2", "nproc_per_node": "gpu", "rdzv_endpoint": "node7:29500", "rdzv_id": "42"}
    wants |= {"training_script_args": flags}
    found = understood(given["torchrun"]["args"])
    assert {key: found[key] for key in wants} == wants


def test_slurm_queues_a_preempted_job_again_and_keeps_its_log() -> None:
    options = {line.split()[1] for line in Path(SLURM).read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"--requeue", "--open-mode=append", "--signal=USR1@600"} <= options


def test_slurm_activates_the_environment_of_the_checkout(cluster, tmp_path: Path) -> None:
    activate = tmp_path / "submitted from" / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("export TORCHRUN_ENDS_WITH=5\n")
    assert cluster(SLURM, "--config", DEBUG)[0].returncode == 5


@pytest.mark.parametrize(("script", "args"), [(TWO_HOSTS, ["node1"]), (SLURM, [])], ids=["two_hosts", "slurm"])
class TestBoth:
    def test_the_exit_code_is_passed_on_and_torchrun_waits_as_it_is_told(self, cluster, script, args) -> None:
        told = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1800"}
        done, given = cluster(script, *args, "--config", DEBUG, ends_with=17, **told)
        assert done.returncode == 17
        assert given["torchrun"]["torch"].items() >= told.items()

    @pytest.mark.parametrize("config", [DEBUG, *slow(f"--config={DEBUG}")])
    def test_the_config_may_stand_alone(self, cluster, script: str, args: list[str], config: str) -> None:
        done, given = cluster(script, *args, config, "--training.steps=50")
        assert (done.returncode, done.stderr.replace(AT_WORK, "")) == (0, "")
        assert understood(given["torchrun"]["args"])["training_script_args"] == [config, "--training.steps=50"]

    def test_a_mistake_ends_it_before_anything_is_started(self, cluster, script: str, args: list[str]) -> None:
        done, given = cluster(script, *args, "--config", DEBUG, "--training.stepz=5")
        assert done.returncode == 2
        assert "did you mean training.steps?" in done.stderr
        assert "Traceback" not in done.stderr
        assert not {"srun", "torchrun"} & set(given)

    @pytest.mark.parametrize("rest", [[], ["--training.steps=5"], ["debug"]])
    def test_without_a_config_it_says_how(self, cluster, script: str, args: list[str], rest: list[str]) -> None:
        done, given = cluster(script, *args, *rest)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")
        assert " FILE [--section.key VALUE ...]" in done.stderr
        assert not given


def test_slurm_checks_the_number_of_processes(cluster) -> None:
    done, given = cluster(SLURM, "--config", DEBUG, "--parallelism.data_parallel_shard_degree=2")
    assert done.returncode == 2
    assert "the number of processes, 4" in done.stderr
    assert not {"srun", "torchrun"} & set(given)


def test_slurm_ends_if_the_hosts_are_not_known(cluster, tmp_path: Path) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexit 9\n")
    done, given = cluster(SLURM, "--config", DEBUG)
    assert done.returncode == 9
    assert not given
