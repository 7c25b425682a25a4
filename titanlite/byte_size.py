"""How many bytes, in every message and table that gives an amount by itself."""

_MIB, GIB = 2**20, 2**30


def byte_size(n_bytes: float, beside: float = 0) -> str:
    """Write a number of bytes in GiB, or in MiB where that would be less than one.

    Args:
        n_bytes: the number.
        beside: the largest number that it stands beside, as a sum: both have its unit.
    """
    unit, name = (GIB, "GiB") if max(n_bytes, beside) >= GIB else (_MIB, "MiB")
    return f"{n_bytes / unit:,.1f} {name}"
