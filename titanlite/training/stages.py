"""Add the mixture of sources and the stages of a run to the receipt."""

import math

from titanlite.config.schema import Config
from titanlite.data.mixture import Mixture
from titanlite.data.stages import StageTable, weights_in_words
from titanlite.errors import CheckpointError
from titanlite.receipt import Entry, Receipt, Skipped


def require_same_steps(table: StageTable, config: Config) -> None:
    """Raise CheckpointError if the number of steps has changed since the checks, as another checkpoint was saved."""
    if table.steps != config.training.steps:
        saw, want = f"{table.steps} steps take training.tokens", f"{config.training.steps}, as a moment ago"
        raise CheckpointError.of("this start", "the checkpoint", saw, want, "start again: another has been saved")


def add_stages(receipt: Receipt, config: Config, mixture: Mixture, start: int) -> None:
    """Add the shuffle window, shares and epochs of each source, and stages to the receipt, if the run has them."""
    table, last = mixture.table, mixture.table.steps
    if window := config.data.shuffle_window:
        applied: dict[str, object] = {"samples": window // table.unit_len, "of_tokens": table.unit_len}
        receipt.add(Entry("data.shuffle_window", window, applied, count=1))
    if config.data.mixture:
        tokens, asked, epochs = mixture.tokens(last), mixture.asked(last), mixture.epochs(last)
        total = max(1, table.tokens(last))
        shares = (f"{n} {tokens[n] / total:.4%} of tokens (asked {float(asked[n] / total):.4%})" for n in epochs)
        applied = {"shares": "; ".join(shares)}
        applied |= {
            name: {
                "asked_share": round(float(asked[name] / total), 6),
                "share": round(tokens[name] / total, 6),
                "tokens": tokens[name],
                "epochs": _rounded_if_known(epochs[name]),
                "epochs_so_far": _rounded_if_known(mixture.epochs(start)[name]),
            }
            for name in epochs
        }
        rounded = tuple(
            Skipped(
                f"shares from step {row.from_step + 1} on: {weights_in_words(row.asked)}",
                "rounded to " + ", ".join(f"{name} {float(share):.5f}" for name, share in shares.items()),
            )
            for row, shares in mixture.rounded
        )
        names = [source.name for source in config.data.mixture]
        receipt.add(Entry("data.mixture", names, applied, count=len(epochs), skipped=rounded))
    if config.data.stage or len(table.rows) > 1:
        skipped = {name or "data.source": n for name, n in mixture.skipped(last).items() if n}
        left_out = tuple(
            Skipped(f"{n:,} tokens of {name}", "the rest of a sample, where seq_len grows")
            for name, n in skipped.items()
        )
        rows = {f"from_step_{row.from_step + 1}": row.to_json() for row in table.rows}
        asked_from = [stage.from_tokens for stage in config.data.stage]
        applied = {"stages": len(rows), **rows}
        receipt.add(Entry("data.stage", asked_from, applied, count=len(rows), skipped=left_out))


def _rounded_if_known(epochs: float) -> float | None:
    """Round a number of epochs for the receipt; None for NaN, as while the source is still being tokenized."""
    return None if math.isnan(epochs) else round(epochs, 4)
