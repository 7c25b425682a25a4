"""Record the collectives of a step: build the run for one rank of a world of any size, and take its first step, on
tensors without memory.

Blocks of the same kind do the same work. The first recording has the first and the last block, and one block of each
other kind. Another recording for each kind has one more block of it: the difference is the work of every further block.
A reduction over all blocks at once, in the update, grows in bytes instead of calls. If the recipe distributes whole
matrices over ranks, the distribution depends on all blocks, so all are recorded. So they are if parameters of blocks
are frozen, perhaps in some blocks only. One micro-step stands for all between the first and the last.

A recording of one rank lacks the following quantities, for which there are formulas:

    the busiest rank                        keys that are exchanged (`forecast/step_time.py`), matrices that are
                                            distributed (`forecast/update_work.py`)
    working set, slack, symmetric memory    `forecast/memory.py`
    the rates of the hardware               `forecast/devices`
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import numpy as np
import torch

from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import FROZEN, MATRIX_RULES
from titanlite.data.batches import padding_of
from titanlite.models.block_kinds import kind_of
from titanlite.models.find import build_model
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.context import token_group
from titanlite.parallel.fake_world import fake_world
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry
from titanlite.recorder.recorder import CollectiveMatmul, Recorded, Recorder
from titanlite.training.assemble import device_to_plan_for
from titanlite.training.build import build
from titanlite.training.receipt import add_entries
from titanlite.training.step import train_step


@dataclass(frozen=True)
class Recording:
    """The collectives that one rank calls in a step."""

    collectives: Counter[Recorded]  # number of calls of each
    pairs: Counter[CollectiveMatmul]  # number of calls of each collective with a matmul
    entries: list[Entry]  # entries of the receipt, without compiling and memory, for the blocks that were recorded


@dataclass(frozen=True)
class _Step(Recording):
    """The recording of a step with some of the blocks. `collectives` lacks those of the update, listed in `update`."""

    update: list[Recorded]

    def plus(self, n: int, one: "_Step", none: "_Step") -> "_Step":
        """Return this step plus n times the work that the step `one` has more than the step `none`."""

        def summed(own: Counter, with_one: Counter, without: Counter) -> Counter:
            return Counter({key: own[key] + n * (with_one[key] - without[key]) for key in own | with_one})

        update = [
            own._replace(n_bytes=own.n_bytes + n * (a.n_bytes - b.n_bytes))
            for own, a, b in zip(self.update, one.update, none.update, strict=True)
        ]
        return replace(
            self,
            update=update,
            collectives=summed(self.collectives, one.collectives, none.collectives),
            pairs=summed(self.pairs, one.pairs, none.pairs),
        )


def record(
    checked: CheckedRun,
    world: int,
    device: str | None = None,
    rank: int = 0,
    documents: Sequence[np.ndarray] = (),
    *,
    all_blocks: bool = False,
) -> Recording:
    """Record the first step of a run.

    Args:
        checked: the checked config of the run, with a save-list.
        world: number of processes.
        device: one of `forecast.device_specs.DEVICES`; None: a CPU.
        rank: the rank to record.
        documents: for each micro-batch of N tokens, [N] int32: the index at which each token's document begins.
            Micro-steps take them in turn. If empty, each sample is one document.
        all_blocks: record every block and micro-step, even if they are equal.
    """
    n_layers, kinds = checked.dims.n_layers, _blocks_alike(checked)
    chosen = {0, n_layers - 1, *(numbers[0] for numbers in kinds)}
    by_matrix = any(group.rule in MATRIX_RULES for group in checked.optimizer.groups.values())
    has_frozen = any(_frozen_in_blocks(checked))
    # The forward of a user's model may depend on all of its blocks.
    if all_blocks or checked.config.model.file or by_matrix or has_frozen:
        chosen = {*range(n_layers)}

    def step(blocks: set[int]) -> _Step:
        numbers = None if len(blocks) == n_layers else sorted(blocks)
        return _step(checked, world, device, rank, documents, numbers, every=all_blocks or bool(documents))

    found = none = step(chosen)
    for numbers in kinds:
        if others := [n for n in numbers if n not in chosen]:
            found = found.plus(len(others), step({*chosen, others[0]}), none)
    collectives = +(found.collectives + Counter(found.update))
    return Recording(collectives, +found.pairs, found.entries)


def _frozen_in_blocks(checked: CheckedRun) -> Iterator[str]:
    """Yield the names of the parameters of blocks that are frozen."""
    config = checked.config
    model = build_model(config.model, checked.dims, config.training.seq_len)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, own in update_settings(checked.optimizer, config.optimizer, shapes).items():
        if name.startswith("layers.") and own.rule == FROZEN:
            yield name


def _blocks_alike(checked: CheckedRun) -> list[list[int]]:
    """Return lists of the numbers of blocks; the blocks of a list do the same work."""
    config, dims = checked.config, checked.dims
    assert checked.save_list is not None  # noqa: S101
    rules, kinds = checked.save_list.active(dims.n_layers), defaultdict[object, list[int]](list)
    for n, block in enumerate(build_model(config.model, dims, config.training.seq_len).layers):  # type: ignore[arg-type]
        names = [name for name, _ in block.named_modules()]
        left = tuple(name for name in names if any(f in f"layers.{n}.{name}" for f in config.float8.filter_fqns))
        kinds[kind_of(block), left, rules[n]].append(n)
    return [*kinds.values()]


def _step(
    checked: CheckedRun,
    world: int,
    device: str | None,
    rank: int,
    documents: Sequence[np.ndarray],
    blocks: list[int] | None,
    every: bool,
) -> _Step:
    config = checked.config
    named = device_to_plan_for(device)
    with fake_world(rank, world):
        run = build(checked, named, blocks)
        shape = config.training.local_batch_size, config.training.seq_len
        group = token_group(run.mesh, windows_of(run.model))
        batch = partial(padding_of, shape, torch.device("cpu"), config.data.document_mask, group)
        batches = [batch(starts=starts) for starts in documents or (None,)]
        recorder = Recorder(named, run.model)
        micro_steps = run.memory.micro_steps
        taken = micro_steps if every else min(micro_steps, 3)
        with named.tensors(), recorder, recorder.modules:
            train_step(run, [*islice(cycle(batches), taken)], 1e-3, stop_requested=False)
        with named.tensors():
            add_entries(run, config.data.document_mask)
    calls, pairs = Counter[Recorded](), Counter[CollectiveMatmul]()
    for n, work in enumerate(recorder.work):
        # The second micro-step stands for all between the first and the last.
        times = micro_steps - taken + 1 if n == 2 else 1
        for each in work.collectives:
            calls[each] += times
        for pair, n_calls in work.pairs.items():
            pairs[pair] += times * n_calls
    update = [each for work in recorder.work for each in work.collectives if each.direction == "update"]
    return _Step(calls - Counter(update), pairs, run.receipt.entries, update)
