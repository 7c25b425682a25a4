"""Write numbers of bytes in messages and tables."""

_MIB, GIB = 2**20, 2**30


def byte_size(n_bytes: float, beside: float = 0) -> str:
    """Return a number of bytes in GiB, or in MiB below 1 GiB. The larger of `n_bytes` and `beside` decides the unit."""
    unit, name = (GIB, "GiB") if max(n_bytes, beside) >= GIB else (_MIB, "MiB")
    return f"{n_bytes / unit:,.1f} {name}"
