"""Choose the attention kernel: FlashAttention-4 if it is installed, supports the device and is right; else torch's.

A release of FlashAttention-4 works with few versions of other packages, and a wrong kernel raises no error. So the
first run on a host compares a small case with the definition, in some seconds, and records the versions that passed.

`torch_order` orders torch's kernels for whole samples. Documents and windows use torch's FlexAttention
(`kernels/attention.py`).
"""

import importlib.metadata
import json
import os
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.device import Device
from titanlite.durable import write_durably
from titanlite.json_file import MALFORMED, parse_json
from titanlite.kernels import flash_attention_4
from titanlite.kernels.attention import _attention, _attention_grad
from titanlite.receipt import Entry, Skipped

_PASSED = Path("~/.cache/titanlite/attention.json")
_INSTALL = "pip install -e '.[gpu]'"
_LENGTHS = (100, 1, 155), (130, 1, 285)  # tokens of each piece in the small case: queries, keys


def torch_order() -> AbstractContextManager[object]:
    """Return a context, for training, that orders torch's kernels by speed (`scripts/bench/attention.py`)."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def choose_attention(device: Device, config: Config, dims: ModelDims) -> Entry:
    """Enable FlashAttention-4 on all ranks or on none; collective.

    On a named GPU the package is assumed to be installed.

    Returns:
        The receipt's entry: skipped if the package is not installed or does not support the device or model; missed if
        its results are wrong.
    """
    name, served = "flash_attention_4", flash_attention_4.WIDTHS.get((device.capability or (0, 0))[0], ())
    flash_attention_4.serve(())
    dtype, width = getattr(torch, config.training.mixed_precision_param), dims.head_width
    versions, broken, why = "taken to be installed", "", ""
    if not served or dtype not in flash_attention_4.DTYPES:
        why = f"it serves Hopper and Blackwell in 16 bits, not {device.name} in {dtype}"
    elif width not in served:
        why = f"it serves heads of {', '.join(map(str, served))}, not of {width}"
    elif not device.is_named:
        try:
            versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in flash_attention_4.PACKAGES)
            broken = _wrong_with(versions, device, dtype, width, dims.n_heads // dims.n_kv_heads)
        except importlib.metadata.PackageNotFoundError as error:
            why = f"{error.name} is not installed, and documents and windows attend at half the rate: {_INSTALL}"
    of_ranks = [(why, broken)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (why, broken))  # hosts may have different packages
    why, broken = (next(filter(None, of), "") for of in zip(*of_ranks, strict=True))
    if broken:
        return Entry(name, "auto", "not used", count=0, missed=[Skipped("attention", broken)])
    if why:
        return Entry(name, None, "not used", count=0, skipped=[Skipped("attention", why)])
    flash_attention_4.serve(served)
    return Entry(name, None, versions, count=1)


def _wrong_with(versions: str, device: Device, dtype: torch.dtype, width: int, heads_of_key: int) -> str:
    """Return what is wrong with the installed FlashAttention-4, or "". Versions that passed before are not tested
    again.

    `width`: elements of a head. `heads_of_key`: heads of queries for each head of keys.
    """
    on, heads = f"torch {torch.__version__}, {device.name}", f"{heads_of_key} × {width}"
    of = f"{versions}, {on}, {dtype}, {heads}"
    path, passed = _PASSED.expanduser(), list[str]()
    with suppress(OSError, *MALFORMED):
        passed = [str(each) for each in parse_json(path.read_bytes())]
    try:
        flash_attention_4.package()
        wrong = "" if of in passed else _wrong(device.of_tensors, dtype, width, heads_of_key)
    except Exception as error:  # a broken installation may raise any error
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if wrong:
        return f"{wrong}; {_INSTALL} brings versions that fit, and without flash-attn-4 torch's kernels attend"
    if of not in passed:
        with suppress(OSError):  # without a record the next run tests again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps([*passed, of], indent=1) + "\n", by=f".{os.getpid()}")
    return ""


def _wrong(device: torch.device, dtype: torch.dtype, width: int, heads_of_key: int) -> str:
    """Attend over pieces and whole samples, forward and backward; return a result with more than rounding errors, or
    "".

    The bound of 1.5 eps on the norm is for three roundings to 16 bits, of half an eps each: of attention weights and
    gradients of scores before they are multiplied, and of results. `heads_of_key`: heads of queries for each head of
    keys.
    """
    K, (queries, keys) = 2, _LENGTHS
    random, M, N = torch.Generator(device).manual_seed(0), sum(queries), sum(keys)
    sizes = (M, K * heads_of_key), (N, K), (N, K), (M, K * heads_of_key)
    q, k, v, grad = (torch.randn(*size, width, generator=random, device=device, dtype=dtype) for size in sizes)
    at = torch.tensor([[0, *accumulate(lengths)] for lengths in _LENGTHS], dtype=torch.int32, device=device)
    runs = torch.tensor([[0, 0, N, 0, at.shape[1]]])
    for (bounds, run, S, n), window in product(((at, runs, N, N), (None, None, M // 2, M)), (0, 64)):
        wide_q, wide_k, wide_v = (x.double() for x in (q, k[:n], v[:n]))
        inputs, given = (wide_q, wide_k, wide_v), (None, bounds, run, None, S, window)
        truth, true_sums = _attention.definition(*inputs, *given)
        truths = truth, *_attention_grad.definition(grad.double(), *inputs, truth, true_sums, *given)
        out, sums = flash_attention_4.attend(q, k[:n], v[:n], bounds, S, window)
        grads = flash_attention_4.attend_grad(grad, q, k[:n], v[:n], out, sums, bounds, S, window)
        names = "results", "gradients of queries", "gradients of keys", "gradients of values"
        for name, got, wanted in zip(names, (out, *grads), truths, strict=True):
            off = ((got - wanted).norm() / wanted.norm() / torch.finfo(dtype).eps).item()
            if not off <= 1.5:
                return f"its {name} are wrong by {off:.1f} eps, heads of {width} and window {window}"
    return ""
