"""Check what is asked of the data: what needs no look at any file."""

from titanlite.config.problems import Problems
from titanlite.config.schema import Config


def check_data(config: Config, problems: Problems) -> None:
    """Check that the keys of the data fit each other."""
    window, seq_len = config.data.shuffle_window, config.training.seq_len
    if 0 < window < seq_len:
        want = f"0, or at least the {seq_len} tokens of a sample (training.seq_len)"
        problems.add("data.shuffle_window", str(window), want, "shuffle_window = 0 (the whole source)")
