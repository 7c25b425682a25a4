"""Predict the memory and speed of a run, and format the prediction for `titanlite plan --world N`.

The models are `titanlite/forecast/memory.py` and `step_time.py`. Where these cannot predict, a note gives the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from titanlite.byte_size import byte_size
from titanlite.config.recipe_schema import SaveList
from titanlite.errors import ConfigError, Problem
from titanlite.forecast.activation_cost import block_costs, no_cost_reasons
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import choose, in_words
from titanlite.forecast.device_specs import Rates, no_rates_reason
from titanlite.forecast.memory import GIB, MARGIN, Memory, MemoryModel, usable
from titanlite.forecast.outlook import Outlook, large, outlook, token_flops
from titanlite.forecast.search import changes_that_fit, processes_that_fit
from titanlite.forecast.step_time import StepTime, StepTimeModel
from titanlite.forecast.update_time import UpdateTime
from titanlite.observe.peak_flops import dense_bf16_flops
from titanlite.text_table import columns

_DEFAULT = " (the default of --device)"
_CLASSES = {  # clearer names for classes of work in `StepTime`
    "tokens": "collectives of tokens",
    "weights": "FSDP casts and sums",
    "fsdp": "FSDP collectives not overlapped",
}


@dataclass(frozen=True)
class Forecast:
    """The prediction for a run. A field that is None is not known.

    Attributes:
        rates: measured rates of the device that the run is predicted for.
        save_list: the run's save-list; for `auto`, the list chosen by `rates`.
        memory: bytes of a rank at its peak, by category.
        step: milliseconds of a step by class of work; `update` divides the optimizer's part.
        tokens_per_second: per GPU.
        notes: parts that are not predicted, and costs that a prediction leaves out; a line each.
        symmetric_memory: bytes on top of the peak that other ranks write into, where the GPUs can do so.
        later_window: bytes on top of the peak if a rank's experts get rows for two windows (`expert_windows.py`).
        attended: lengths of documents, which give attention's share of plain causal attention.
        between_hosts: milliseconds of a step that collectives between hosts take, hidden or not, by name.
        stage: shape of the stage whose step is predicted, in words; "" if the run has a single stage.
        is_default: whether nobody has named the device.
    """

    rates: Rates
    save_list: SaveList | None = None
    memory: Memory | None = None
    step: StepTime | None = None
    tokens_per_second: float | None = None
    notes: tuple[str, ...] = ()
    symmetric_memory: int | None = None
    later_window: int = 0
    outlook: Outlook | None = None
    attended: AttendedShare | None = None
    stage: str = ""
    update: UpdateTime | None = None
    between_hosts: Mapping[str, float] = field(default_factory=dict)
    is_default: bool = False

    @property
    def on_device(self) -> int:
        """Return the bytes that a device must hold, another window of rows included. `memory` must not be None."""
        assert self.memory is not None  # noqa: S101
        return self.memory.total + (self.symmetric_memory or 0) + self.later_window

    def as_dict(self) -> dict[str, object]:
        """Return the forecast in JSON's types, with bytes and milliseconds by category."""
        return {
            "memory_bytes": self.memory and {**self.memory.categories(), "total": self.memory.total},
            "symmetric_memory_bytes": self.symmetric_memory,
            "later_window_bytes": self.later_window,
            "step_ms": self.step and {**self.step.categories(), "total": self.step.total},
            "between_hosts_ms": dict(self.between_hosts),
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.outlook and self.outlook.mfu,
            "attended_share": self.attended and self.attended.of(),
            "tokens_per_day": self.outlook and self.outlook.tokens_per_day,
            "days": self.outlook and self.outlook.days,
            "rates_of": self.rates.device,
            "network": self.rates.network.key if self.between_hosts else None,
            "attention_by": self.rates.attention_by,
            "notes": list(self.notes),
        }


def forecast(
    memory: MemoryModel, save_list: SaveList | None, rates: Rates, attended: AttendedShare | None = None
) -> Forecast:
    """Predict memory and speed of a run. A `save_list` of None stands for `auto`, and is chosen here by `rates`.

    Raises:
        RecipeError: the save-list keeps attention without its q, k and v.
    """
    config, dims = memory.config, memory.dims
    chosen = config.activation_checkpoint
    if memory.run.no_trace_reason:
        return Forecast(rates, save_list, notes=(f"no memory and no time: {in_a_line(memory.run.no_trace_reason)}",))
    obstacle = no_rates_reason(memory)
    time = None if obstacle else StepTimeModel(memory, rates, attended)
    notes = [f"no time: {in_a_line(obstacle)}"] if obstacle else []
    if save_list is None:
        if time is None or chosen.budget_gib is None:
            notes.append("no memory: the save-list is chosen when the run starts, from timings that are not known here")
            return Forecast(rates, notes=tuple(notes))
        choice = choose(memory, time.times(), chosen.budget_gib)
        save_list = choice.save_list
        notes.append(
            f"with these rates auto keeps {in_words(choice)}; a run times its own blocks and may choose otherwise"
        )
    if why := no_cost_reasons(save_list):
        note = f"no memory and no time: save-list {chosen.recipe}, {in_a_line(why[0])}"
        return Forecast(rates, save_list, notes=(note,))
    blocks = block_costs(memory.run, save_list)
    peak = memory.peak(blocks)
    if peak.gradients < (of_all := 4 * memory.optimizer.trained):
        made, whole = byte_size(peak.gradients, beside=of_all), byte_size(of_all)
        later = "exist at the peak; the rest are made later, in memory that activations leave"
        notes.append(f"of {whole} of gradients {made} {later}")
    if memory.all_windows:
        second, most = byte_size(memory.later_window), byte_size(memory.all_windows)
        of = "a window has rows for 1.5 times the mean of a rank's experts, and for all ranks' tokens at least"
        notes.append(f"{of}; more rows take {second} in a second window, and {most} under the worst routing")
    if not peak.logits and memory.logits >= GIB / 10:
        size = byte_size(memory.logits)
        notes.append(f"the logits ({size}) are not part of the peak: it is later in backward, after they are freed")
    symmetric, later = memory.symmetric_memory, memory.later_window
    if time is None:
        return Forecast(rates, save_list, peak, notes=tuple(notes), symmetric_memory=symmetric, later_window=later)
    step = time.step(blocks)
    if dims.head_width not in rates.attention:
        measured = ", ".join(map(str, rates.attention))
        wider = f"is timed as the next wider one measured, or else the widest (measured: {measured})"
        notes.append(f"attention with head width {dims.head_width} {wider}")
    if memory.run.windows - {rates.window}:
        measured = f"measured with {rates.window} tokens and head width 256, and is timed as that"
        notes.append(f"windowed attention was {measured}")
    if memory.world > rates.host:
        source = "bandwidth and NCCL's own latencies; they were not measured here"
        notes.append(f"collectives between hosts are predicted from the network's published {source}")
    if memory.run.context_parallel > 1:
        notes.append(f"exchanges of keys and values take {time.key_exchange(blocks):,.0f} ms of a step")
    if config.data.document_mask:
        notes.append(_attention_note(attended, rates, dims.head_width))
    speed = time.tokens_per_second(step)
    peak_flops = dense_bf16_flops(rates.device)
    assert peak_flops is not None  # noqa: S101  # known for each device with rates
    goes_on = outlook(config, token_flops(config, dims, attended), memory.world, speed, peak_flops)
    found = Forecast(rates, save_list, peak, step, speed, tuple(notes), symmetric, later, goes_on, attended)
    return replace(found, update=time.update(), between_hosts=time.between_hosts(step))


def _attention_note(attended: AttendedShare | None, rates: Rates, width: int) -> str:
    """Return a note on how attention within documents is predicted. `width`: elements of an attention head."""
    if attended is None:
        unknown = "the lengths of documents are not known before titanlite prepare: time and MFU are of plain causal"
        return f"{unknown} attention, and a run, which ends it with each document, takes less"
    looked_at = f"in {attended.samples} samples of its data, whose documents have {attended.mean:,.0f} tokens"
    of_rate = "it is timed as with documents of 1,000 tokens (longer ones take less), and MFU counts what is attended"
    if width not in rates.attention_documents:
        measured = ", ".join(map(str, rates.attention_documents))
        of_rate += f"; its kernel was timed with head width {measured}, not {width}"
    return f"attention within documents is {attended.of():.1%} of plain causal {looked_at} in the mean; {of_rate}"


def in_a_line(problem: Problem) -> str:
    """Return a problem as one line, without its fix."""
    seen = f" = {problem.saw}" if problem.saw else ""
    return f"{problem.where}{seen}; want {problem.want}"


def memory_rows(predicted: Forecast) -> list[list[str]]:
    """Return a row (name, size) for each category of memory and for their sum, all in the unit that suits the sum."""
    if predicted.memory is None:
        return []
    sizes = predicted.memory.categories() | {"total": predicted.memory.total}
    if predicted.symmetric_memory:
        sizes["symmetric memory, on top"] = predicted.symmetric_memory
    if predicted.later_window:
        sizes["a second window of experts' rows, on top"] = predicted.later_window
    return [[name, byte_size(n, beside=sizes["total"])] for name, n in sizes.items()]


def time_rows(predicted: Forecast) -> list[list[str]]:
    """Return rows with the milliseconds of each class of work and their sum, then speed, MFU and length of the run."""
    if predicted.step is None or predicted.outlook is None:
        return []
    rows = [[_CLASSES.get(name, name), f"{ms:,.1f} ms"] for name, ms in predicted.step.categories().items()]
    speed = ["tok/s/GPU", f"{predicted.tokens_per_second:,.0f}"]
    run = predicted.outlook
    rows += [["total", f"{predicted.step.total:,.1f} ms"], speed, ["MFU", f"{run.mfu:.1%}"]]
    return [*rows, ["tokens a day", large(run.tokens_per_day)], [f"{run.steps:,} steps", run.lasts]]


def forecast_table(predicted: Forecast, device_gib: float | None = None) -> str:
    """Return the tables and notes of a forecast. A run that does not fit is shown too; `check_device` refuses it."""
    text, (gib, device) = "", _gib_and_name(predicted, device_gib)
    if predicted.memory is not None:
        of_stage = f" in the largest stage, {predicted.stage}" * bool(predicted.stage)
        title = f"peak memory of a rank{of_stage} (CUDA's context and NCCL's buffers come on top)"
        text += f"\n{title}\n{columns(*memory_rows(predicted))}"
        if predicted.on_device <= usable(gib):
            text += f"fits {device}: {byte_size(predicted.on_device)} of {gib:g} GiB\n"
    if rows := time_rows(predicted):
        step = f"step time of the largest stage, {predicted.stage}" if predicted.stage else "step time"
        name, _, more = predicted.rates.device.partition(",")
        text += f"\npredicted {step}, from rates measured on {name}{_DEFAULT * predicted.is_default},{more}"
        text += f"; attention by {predicted.rates.attention_by} (titanlite[gpu])\n{columns(*rows)}"
    if predicted.between_hosts:
        host, network = predicted.rates.host, predicted.rates.network.name
        text += f"\nbetween hosts of {host} GPUs in a step, by {network} with one NIC for each GPU\n"
        text += columns(*([name, f"{ms:,.1f} ms"] for name, ms in predicted.between_hosts.items()))
        text += "the step time has what compute does not hide of these, and what it loses beside them\n"
    return text + "".join(f"\n{note}\n" for note in predicted.notes)


def _gib_and_name(predicted: Forecast, device_gib: float | None) -> tuple[float, str]:
    """Return the memory in GiB and the name of the device: by `device_gib` if given, else by the forecast's rates."""
    rates = predicted.rates
    name = f"{rates.device.partition(',')[0]}{_DEFAULT * predicted.is_default}"
    return (device_gib, "the device") if device_gib else (rates.device_gib, name)


def check_device(memory: MemoryModel, predicted: Forecast, device_gib: float | None) -> None:
    """Refuse a run whose predicted peak exceeds the device's memory. The error lists changes that would make it fit.

    `device_gib`: the device's memory; None: the memory of the forecast's device, and an unknown peak is accepted.
    """
    if predicted.memory is None or predicted.save_list is None:
        if device_gib is None:
            return
        want = "a run whose memory can be predicted: " + "; ".join(predicted.notes)
        raise ConfigError.of("command line", "--device-gib", f"{device_gib:g}", want, "remove it")
    gib, device = _gib_and_name(predicted, device_gib)
    where, saw = ("--device-gib", f"{gib:g}") if device_gib else ("--device", f"{device}, {gib:g} GiB")
    if predicted.on_device <= usable(gib):
        return
    asked = memory, predicted.save_list, usable(gib)
    flags = changes_that_fit(*asked, rates=predicted.rates, attended=predicted.attended)
    more = processes_that_fit(*asked, and_changes=not flags)
    besides = ""
    if pushed := predicted.symmetric_memory:
        besides = f" and {byte_size(pushed)} of symmetric memory (copy engines, where they can)"
    if later := predicted.later_window:
        besides += f" and {byte_size(later)} for a second window of experts' rows"
    least = f"at least {predicted.on_device / usable(1):.1f} GiB"
    want = f"{least}: the predicted peak{besides}, with {MARGIN:.1%} of the device left free"
    listed = "".join(f"\n          {flag}" for flag in flags)
    if flags:
        order = ", the cheapest first" if flags[0].tokens_per_second else ""
        fix = f"one of these{order}{listed}" + (f"\n          or {more}, more processes" if more else "")
    else:
        nothing = "no other save-list, layout and batch would make it fit"
        fix = f"{more}: {nothing}" if more else f"a smaller model: {nothing}, nor more processes"
    raise ConfigError.of("the run does not fit", where, saw, want, fix)
