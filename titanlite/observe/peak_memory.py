"""Tell what the memory of a rank was for, at the moment at which most was allocated.

The allocator tells each allocation and its end, when and from where. What was there before the window are parameters,
the optimizer's state, and buffers. What was made in the step and is freed once the optimizer is at work are
gradients. The rest is named for who made it: FSDP, a cast to float8, or else the model, whose activations it is.
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
    """Attribute the bytes at the peak; None if the trace has no memory.

    Args:
        events: of a trace with memory.
        device: "cuda" or "cpu".
        held: bytes by category that were there before; on a GPU "before" is all that was.
        window: the steps, by the host's clock.
        reserved: most bytes that the caching allocator had; 0 on a CPU.
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
        if size < 0 and address not in live:  # it was there before
            continue
        live.remove(address) if size < 0 else live.add(address)
        total += size
        if total > most and window[0] <= ts <= window[1]:
            most, peak = total, i
    if peak < 0:
        return None
    there: dict[int, tuple[float, int, str]] = {}  # address → when made, bytes, by whom
    for ts, size, address, maker in changes[: peak + 1]:
        there.pop(address, None) if size < 0 else there.update({address: (ts, size, maker)})
    now = changes[peak][0]
    begins = next((start for start, end in optimizer if end > now), math.inf)  # it may be at work now
    freed = {address: ts for ts, size, address, _ in reversed(changes[peak + 1 :]) if size < 0}  # first after the peak
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
    """Yield (when, bytes, address, by whom) of each allocation of a thread, and of each end, with negative bytes."""
    for e, around in nested(events):
        if e["ph"] != "X":
            makers = (maker for caller in reversed(around) if (maker := _maker(caller["name"])))
            yield e["ts"], e["args"]["Bytes"], e["args"]["Addr"], next(makers, ACTIVATIONS)


@cache
def _maker(name: str) -> str:
    """Return what an operator allocates, whatever it was called for; "" where that depends on its caller."""
    if _BY_FLOAT8.search(name):
        return FLOAT8
    return GATHERED if _BY_FSDP.match(name) else ""
