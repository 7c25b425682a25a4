"""Attribute the memory of a rank to categories, at the moment of a trace at which most was allocated.

The trace records the time of each allocation and each free, and the operators that called them. Memory allocated before
the traced steps holds parameters, optimizer state, gathered weights and buffers. Memory allocated in a step and freed
after its optimizer has begun holds gradients. All other memory is attributed by the operator that allocated it: to
FSDP, to a cast to float8, or else to the activations of the model.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from titanlite.observe.kernel_classes import Event, nested, span_of
from titanlite.observe.step_profile import OPTIMIZER, PeakMemory

GRADIENTS, GATHERED, FLOAT8, ACTIVATIONS = "gradients", "gathered weights, communication", "float8", "activations"
BUFFERS, FRAGMENTS = "buffers", "fragmentation"

_DEVICE_TYPE = {"cpu": 0, "cuda": 1}  # c10::DeviceType
_BY_FSDP = re.compile(r"^FSDP::|^fsdp::|^c10d::|^_c10d_functional::")
_BY_FLOAT8 = re.compile(r"float8|cast_(amax|rows|transpose|blocks)")


def peak_memory(
    events: Iterable[Event],
    device: str,
    held: Mapping[str, int],
    window: tuple[float, float],
    reserved: int,
) -> PeakMemory | None:
    """Attribute the bytes at the peak to categories; None if the trace records no allocations in the window.

    Args:
        events: all events of a trace that was recorded with allocations.
        device: "cuda" or "cpu".
        held: bytes allocated before the traced steps, by category; on a GPU the key "before" has the total, with
            buffers.
        window: start and end of the traced steps, by the host's clock.
        reserved: most bytes that the caching allocator reserved; 0 on a CPU.
    """
    threads: dict[Any, list[Event]] = defaultdict(list)
    for e in events:
        if (e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")) or (
            e.get("name") == "[memory]" and e["args"].get("Device Type") == _DEVICE_TYPE[device]
        ):
            threads[e["tid"]].append(e)
    changes = sorted(change for found in threads.values() for change in _changes(found))
    marks = (e for found in threads.values() for e in found if e["name"] == OPTIMIZER)
    optimizer = sorted(span_of(e) for e in marks if e.get("cat") == "user_annotation")
    before = held.get("before", 0)
    total, most, peak = 0, 0, -1
    live = set[int]()
    for i, (ts, size, address, _) in enumerate(changes):
        if size < 0 and address not in live:  # allocated before the trace
            continue
        live.remove(address) if size < 0 else live.add(address)
        total += size
        if total > most and window[0] <= ts <= window[1]:
            most, peak = total, i
    if peak < 0:
        return None
    there: dict[int, tuple[float, int, str]] = {}  # address → time, bytes, category by operator
    for ts, size, address, maker in changes[: peak + 1]:
        there.pop(address, None) if size < 0 else there.update({address: (ts, size, maker)})
    now = changes[peak][0]
    begins = next((start for start, end in optimizer if end > now), math.inf)  # the optimizer may have begun
    freed = {address: ts for ts, size, address, _ in reversed(changes[peak + 1 :]) if size < 0}  # time of first free
    categories = {name: size for name, size in held.items() if name != "before"}
    categories[BUFFERS] = max(0, before - sum(categories.values()))
    for address, (made, size, maker) in there.items():
        is_gradient = made < begins <= freed.get(address, 0.0)
        name = GRADIENTS if is_gradient else maker
        categories[name] = categories.get(name, 0) + size
    allocated = sum(categories.values())
    if reserved:
        categories[FRAGMENTS] = max(0, reserved - allocated)
    return PeakMemory({name: size for name, size in categories.items() if size}, allocated, reserved)


def _changes(events: list[Event]) -> Iterator[tuple[float, int, int, str]]:
    """Yield (time, bytes, address, category) of each allocation and each free (bytes < 0) in one thread's events."""
    for e, around in nested(events):
        if e["ph"] != "X":
            makers = (maker for caller in reversed(around) if (maker := _maker(caller["name"])))
            yield e["ts"], e["args"]["Bytes"], e["args"]["Addr"], next(makers, ACTIVATIONS)


@cache
def _maker(name: str) -> str:
    """Return the category of the memory that an operator allocates; "" if it depends on the operator's caller."""
    if _BY_FLOAT8.search(name):
        return FLOAT8
    return GATHERED if _BY_FSDP.match(name) else ""
