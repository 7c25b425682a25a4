"""Read the text of a new run: count its tokens by a sample, and train a tokenizer on it if the user wishes one."""

from dataclasses import dataclass, replace
from pathlib import Path

from titanlite import recipes
from titanlite.commands.at_work import at_work
from titanlite.commands.new_wishes import Wishes, ids_to_train, wished_inputs, wished_model
from titanlite.config.schema import Config
from titanlite.data.inputs import check_inputs
from titanlite.data.order import epochs
from titanlite.data.text_sample import read_sample
from titanlite.data.tokenizer import FileTokenizer
from titanlite.data.train_tokenizer import tokenizer_path, train_tokenizer
from titanlite.forecast.outlook import large
from titanlite.hub import knows_dataset, without_retries_told
from titanlite.preflight.output_file import writable

_COUNTED_BYTES = 1 << 22  # of text in a sample; of many files the estimate is then within some percent
_SOURCE = "data.source"


@dataclass(frozen=True)
class TextSize:
    """The tokens of a run's text.

    Attributes:
        tokens: number of tokens; None: not known.
        words: that number and how it was counted, or why it is not known.
        trained: of a tokenizer that `train:N` asked for: its ids and what it was trained on, in words; else "".
    """

    tokens: float | None
    words: str
    trained: str = ""

    def in_words(self, trained_on: float) -> str:
        """Return the size in words, with the epochs of a run that trains on `trained_on` tokens."""
        if not self.tokens:
            return self.words
        return f"{self.words}. {large(trained_on)} tokens are {epochs(trained_on / self.tokens)}"


def read_text(wishes: Wishes, folder: Path) -> tuple[Wishes, TextSize]:
    """Count the tokens of the wished text. A tokenizer of `train:N` is trained before, unless it is there.

    Returns:
        The wishes, with the file of the trained tokenizer in `folder`/tokenizers, and the size of the text.

    Raises:
        DataError: the text cannot be read.
        RunError: the tokenizer's file cannot be written.
    """
    trained = ""
    if n_ids := ids_to_train(wishes.tokenizer):
        config, inputs = wished_inputs(Config(), replace(wishes, tokenizer="bytes"))
        source = inputs.sources[_SOURCE]
        path = tokenizer_path(source, config.data, n_ids, folder / "tokenizers")
        on = "this text before"
        if not path.exists():
            what = at_work(f"training a tokenizer of {n_ids:,} ids on a sample of {source.name}")
            with what, writable("titanlite new", "--tokenizer", path), without_retries_told():
                on = train_tokenizer(source, config.data, n_ids, path)
        made = FileTokenizer(str(path), path).vocab_size
        trained = f"{made:,} ids, trained on {on}"
        trained += f"; {n_ids:,} were asked for, but nothing more in it occurs twice" if made < n_ids else ""
        wishes = replace(wishes, tokenizer=str(path))
    with at_work(f"counting the tokens of a sample of {wishes.data}"):
        return wishes, replace(_size(wishes), trained=trained)


def _size(wishes: Wishes) -> TextSize:
    """Count the tokens of a text whose tokenizer exists: all of them where this is quick, else by a sample."""
    config, inputs = wished_inputs(Config(), wishes)
    if wishes.lacks_tokenizer:
        return TextSize(None, "not counted, as its tokenizer is not here")
    source, tokenizer = inputs.sources[_SOURCE], inputs.tokenizer
    vocab_size = tokenizer.vocab_size if tokenizer else None
    if source.kind == "tokens" and wishes.model:
        vocab_size = recipes.model_dims(Config(model=wished_model(wishes.model))).vocab_size
    counted = check_inputs(config, vocab_size).tokens.get(_SOURCE)
    if counted is not None:
        return TextSize(counted, f"{counted:,} tokens")
    if tokenizer is None or source.kind == "tokens":
        return TextSize(None, "not counted, as the model decides how many bytes an id has")
    if source.dataset and not source.files and not knows_dataset(source.dataset[0]):
        return TextSize(None, "not counted, as the hub does not give it to this host")
    with without_retries_told():
        sample = read_sample(source, config.data, _COUNTED_BYTES)
    if not sample.n_bytes:
        return TextSize(None, f"not counted, as no text in {sample.origin}")
    tokens = sample.count_tokens(tokenizer)
    each = f"{sample.n_bytes / tokens:.2f} bytes of text each, counted in {sample.origin}"
    if sample.share is None:
        return TextSize(None, f"tokens of {each}; how much text it has is not known")
    return TextSize(tokens / sample.share, f"about {large(tokens / sample.share)} tokens, {each}")
