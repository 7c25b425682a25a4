"""Bounds that a busy machine cannot break: of the processor's time, and not of the clock's."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def cpu_of_children(limit_s: float) -> Iterator[None]:
    """Fail where processes that end within the block, and are waited for, take more of the processor's time.

    Args:
        limit_s: seconds, of all threads, in user code and in the kernel.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took_s < limit_s, f"{took_s:.2f} s of the processor, of {limit_s} s"
