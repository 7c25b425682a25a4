#!/usr/bin/env bash
# From a fresh clone to a picture of a falling loss, in minutes and on two CPU cores: installs what is missing, trains
# configs/debug.toml on two processes, which ends with text from the model, and draws the curve.
#
#     bash scripts/demo.sh [--section.key VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$("$(command -v python3 || command -v python3.11)" scripts/environment.py datasets plot wandb)
export OMP_NUM_THREADS=1     # threads of each process; torchrun would set the same, and say so in four lines
export CUDA_VISIBLE_DEVICES= # on CPUs, whatever the machine has

outputs=outputs/demo-$(date +%Y%m%d-%H%M%S) # each start is a run of its own
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    train.py --config configs/debug.toml --validation.samples "import " "def main(" "$@" --job.dump_folder "$outputs"

"$python" -m titanlite compare "$outputs"/* --out "$outputs/loss.png"
if [ -e .venv/bin/activate ] && ! command -v titanlite > /dev/null; then
    echo "first     source .venv/bin/activate, which puts titanlite on your path; then the commands above"
fi
