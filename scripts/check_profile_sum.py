"""Check that the parts of profiled steps sum to their wall time, by the host's own clock.

    python scripts/check_profile_sum.py outputs/run [--within 0.02]

The clock is read beside the profiler: before the first recorded step, and when the device has done the last. It knows
nothing of the trace, so an interval that the trace lacks, or steps whose edges are wrong, show here. Ends with 1 if a
rank's sum is further off than that.
"""

import argparse
import sys
from pathlib import Path

from titanlite.explain.profiled import read_profiled


def main() -> int:
    """Print a line a rank, and return 0 if all sums hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run with a profile")
    parser.add_argument("--within", type=float, default=0.02, help="share of the wall time; default: %(default)s")
    given = parser.parse_args()
    run, worst = read_profiled(given.run), 0.0
    for profile in run.profiles:
        of_rank = [division for division in run.divisions if division.rank == profile.rank]
        parts = sum(sum(division.parts.values()) for division in of_rank)
        off = abs(parts / profile.clock_us - 1)
        worst = max(worst, off, *(abs(sum(d.parts.values()) / d.wall_us - 1) for d in of_rank))
        sys.stdout.write(
            f"rank {profile.rank}: {len(of_rank)} steps, parts {parts / 1e3:.3f} ms, "
            f"clock {profile.clock_us / 1e3:.3f} ms, {off:.2%} off\n"
        )
    sys.stdout.write(f"worst: {worst:.2%}, allowed: {given.within:.2%}\n")
    return int(worst > given.within)


if __name__ == "__main__":
    sys.exit(main())
