"""Show what a run trains on: sources, shares and epochs, and the documents of a sample or step.

titanlite data FILE                              stages; of each source the share asked for and taken, tokens and epochs
titanlite data FILE --sample I                   the documents of one sample, decoded, with their boundaries
titanlite data FILE --sample I --picture FILE    and its attention mask as a picture
titanlite data FILE --step N                     the documents of all samples of one step

Sources that are not tokenized yet are tokenized first, to their end, even where a run does that in the background.
Nothing is trained. If the run has begun, the stages trained so far are read from its newest checkpoint.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands.arguments import Command, number_of
from titanlite.commands.data_tables import run_tables, sample_text, share_of_causal, step_text
from titanlite.commands.mask_picture import draw_mask
from titanlite.config.stages import follows_ranks
from titanlite.data.run_samples import RunSamples, open_sources
from titanlite.errors import ConfigError
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.preflight.output_file import require_picture, writable
from titanlite.preflight.run_folder import RunFolder
from titanlite.text_table import folded, terminal_width

_SAMPLE, _STEP, _PICTURE = "--sample", "--step", "--picture"
COMMAND = Command(
    "data",
    __doc__ or "",
    {
        f"{_SAMPLE} I": "a sample of training, 0 for the first",
        f"{_STEP} N": "a step of training, 1 for the first",
        f"{_PICTURE} FILE": "file for the picture of the sample's mask, as mask.png",
        "--world N": "number of processes, which a step's samples depend on without training.global_batch_size",
    },
)


def run(argv: Sequence[str]) -> int:
    """Print the stages and sources of a run, or the documents of the sample or step that the flags name."""
    arguments = COMMAND.read(argv)
    own = arguments.own
    for flag, without in ((_STEP, _SAMPLE), (_PICTURE, _STEP)):
        if flag in own and without in own:
            raise ConfigError.of("command line", flag, own[flag], f"no {flag} together with {without}", "remove one")
    if _PICTURE in own and _SAMPLE not in own:
        fix = f"{_SAMPLE} 0 {_PICTURE} {own[_PICTURE]}"
        raise ConfigError.of("command line", _PICTURE, own[_PICTURE], f"{_SAMPLE} I as well: a mask is of one", fix)
    if _PICTURE in own:
        require_picture("titanlite data", Path(own[_PICTURE]), "mask.png", _PICTURE)
    checked = checked_run(arguments.flags, arguments.world)  # with the stages of its checkpoint, if there is one
    config = checked.config
    RunFolder.of(config).require_same(config)
    last = checked.table.steps
    sample, step = (
        number_of(own, flag, int, f"{least} to {most}: there the run ends", f"{flag} {most}", least - 1, most + 1)
        for flag, least, most in ((_SAMPLE, 0, checked.table.samples(last) - 1), (_STEP, 1, last))
    )
    if step is not None and follows_ranks(config, arguments.world):
        want = "--world N as well: without a global_batch_size a step's samples follow from the number of ranks"
        raise ConfigError.of("command line", _STEP, own[_STEP], want, f"{_STEP} {step} --world 1")
    _tell_of_wait(checked)
    sources = open_sources(config, checked.dims.vocab_size, progress=True, unit_len=checked.table.unit_len)
    trained = RunSamples(config, checked.table, sources)
    tokenizer = checked.inputs.tokenizer
    if sample is not None:
        found = trained.at(sample)
        text = sample_text(found, tokenizer)
        if _PICTURE in own:
            path, title = Path(own[_PICTURE]), text.partition("\n")[0]
            with writable("titanlite data", _PICTURE, path):
                draw_mask(found, share_of_causal(found), title, path)
            text += f"{path}\n"
    elif step is not None:
        text = step_text([trained.at(index) for index in trained.of_step(step)], tokenizer)
    else:
        text = f"{arguments.file}: {run_tables(trained, config)}"
        if follows_ranks(config, arguments.world):
            text += "\nthe batch is that of the fewest ranks; pass --world N for another number\n"
        text += "".join(f"\n{note}\n" for note in checked.table.notes)
    sys.stdout.write(folded(text, terminal_width()))
    return 0


def _tell_of_wait(checked: CheckedRun) -> None:
    """Print on stderr which sources are tokenized now, although a run would do it in the background."""
    if checked.config.data.prepare == "background":
        for key in checked.inputs.trained.keys() - checked.inputs.shards.keys():
            name, what = checked.inputs.sources[key].name, "tokenized to its end first, for which a run does not wait"
            sys.stderr.write(f"{key} = {name}: {what}; what is done by an interruption is kept\n")
