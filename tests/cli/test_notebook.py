"""The notebook of the docs runs, from its first cell to its last."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join([*code, "plt.savefig('loss.png')"]))
    given = os.environ | {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'import ") == 2
    assert (tmp_path / "loss.png").stat().st_size > 5000
