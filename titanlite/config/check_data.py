"""Check what is asked of the data: what needs no look at any file."""

from titanlite.config.problems import Problems
from titanlite.config.schema import Config
from titanlite.config.stages import stage_configs


def check_data(config: Config, problems: Problems) -> None:
    """Check that the keys of the data fit each other."""
    window, seq_len = config.data.shuffle_window, config.training.seq_len
    if config.data.prepare == "background" and not window:
        want = '"first" without data.shuffle_window: an order of the whole source begins anywhere in it'
        problems.add("data.prepare", '"background"', want, f"shuffle_window = {1 << 26}", against="data.shuffle_window")
    if config.data.prepare == "background" and config.data.packing == "best_fit":
        want = '"concat" with data.prepare = "background": how documents fit together is decided over all of them'
        problems.add("data.packing", '"best_fit"', want, 'prepare = "first"', against="data.prepare")
    lengths = sorted({seq_len, *(now.training.seq_len for _, _, now in stage_configs(config))})
    longest = lengths[-1]
    if 0 < window < longest:
        of = "training.seq_len" if longest == seq_len else "the longest seq_len of data.stage"
        want = f"0, or at least the {longest} tokens of a sample ({of})"
        problems.add("data.shuffle_window", str(window), want, "shuffle_window = 0 (the whole source)")
    if config.data.packing == "best_fit" and len(lengths) > 1:
        several = ", ".join(map(str, lengths))
        want = f'"concat" where stages have several seq_len ({several}): documents are packed for one'
        problems.add("data.packing", '"best_fit"', want, 'packing = "concat", or one seq_len in all stages')
