"""Draw the attention mask of one sample: which tokens attend to which."""

from pathlib import Path

from titanlite.data.run_samples import TrainedSample

_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")  # Paul Tol's bright ones
_MOST_TICKS = 12
_LEAST_NAMED = 0.03  # share of a sample that padding must take to be labelled


def draw_mask(sample: TrainedSample, share: float, title: str, path: Path) -> None:
    """Draw the mask of a sample into `path`: rows are the tokens that attend, columns the tokens attended to.

    `share`: the mask's share of plain causal attention, shown below `title`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 7.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    documents, seq_len = sample.documents, sample.seq_len
    filled = documents[-1].at + documents[-1].length if documents else 0
    axes.fill((0, 0, seq_len), (0, seq_len, seq_len), color="#f1f1f1", linewidth=0)  # plain causal attention
    lengths, at = sample.attends_within, 0
    for n, length in enumerate(lengths):
        corners = [(at, at), (at, at + length), (at + length, at + length)]
        axes.fill(*zip(*corners, strict=True), color=_COLOURS[n % len(_COLOURS)], linewidth=0)
        at += length
    if len(lengths) == 1:  # else each document has its own colour
        for document in documents[1:]:
            axes.plot([0, document.at], [document.at, document.at], color="white", linewidth=0.6)
    if filled < seq_len:
        axes.axhspan(filled, seq_len, color="#dddddd")
    if filled < (1 - _LEAST_NAMED) * seq_len:
        axes.text(seq_len / 2, (filled + seq_len) / 2, "padding", ha="center", va="center", fontsize=8, color="#555555")
    axes.set(xlim=(0, seq_len), ylim=(seq_len, 0), aspect="equal")
    axes.set_xlabel("place of the token that is attended to")
    axes.set_ylabel("place of the token that attends")
    borders = [document.at for document in documents if document.at]
    if len(borders) <= _MOST_TICKS:
        axes.set_yticks([0, *borders, seq_len])
    figure.suptitle(f"{title}\n{share:.1%} of causal attention", x=0.02, ha="left", fontsize=10)
    figure.savefig(path)
