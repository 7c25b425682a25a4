#!/usr/bin/env bash
# One run on several hosts without a scheduler: the same command on each of them, within ten minutes of each other.
#
#     bash scripts/launch/two_hosts.sh node1 --config configs/llama3_8b.toml [--section.key VALUE ...]
#
# The first argument is the host where the processes meet, one of those that train; port 29500 must be open there. All
# hosts need this checkout at the same commit, the same environment and, for checkpoints, one shared `job.dump_folder`.
# To try it on one machine, without GPUs: two terminals, and
#
#     NPROC=1 bash scripts/launch/two_hosts.sh localhost --config configs/debug.toml
set -euo pipefail
if [[ ${2-} != --config && ${2-} != *.toml ]]; then
    echo "usage: bash scripts/launch/two_hosts.sh HOST FILE [--section.key VALUE ...]" >&2
    exit 2
fi
cd "$(dirname "$0")/../.."
meet=$1
shift

# A restart over gloo must find a fresh store; over NCCL this changes nothing.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds from a signal until torchrun kills the processes; its own 30 are too short for the step at hand and a large
# checkpoint. Before torch 2.12 they are always 30: what takes longer is lost, the checkpoint before it stays.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# --max-restarts     If a process dies, every host stops its processes and starts them again, and the run goes on from
#                    its newest checkpoint (checkpoint.resume = "auto"). Steps since then are done again.
# --signals-to-handle  SIGUSR1 in addition to torchrun's own: save, and stop. SIGTERM and SIGINT do the same.
#                    torchrun itself ends with exit code 1 then; status.json in the run folder says "stopped".
# --local-ranks-filter, --tee, --log-dir   Of each host, only local rank 0 writes to the terminal; what every rank writes
#                    is in outputs/torchrun. The first rank that failed has the last word, with its traceback.
# A mistake in the config ends here, with one message; torchrun would start the processes again.
titanlite validate "$@" > /dev/null

exec torchrun \
    --nnodes "${NNODES:-2}" \
    --nproc-per-node "${NPROC:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$meet:29500" \
    --rdzv-id titanlite \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --local-ranks-filter 0 --tee 3 --log-dir outputs/torchrun \
    train.py "$@"
