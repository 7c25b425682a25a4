"""A token of generated text, with random weights: python scripts/bench/generate.py [FILE] [--profile]

Milliseconds of a token and tokens a second, in bfloat16, of 1 and of 32 prompts together, at 64 and at 1,024 tokens of
context: medians over 24 tokens of two calls. Beside them the time in which the device's memory gives all weights once,
by a copy of as many bytes. `--profile` names the device's longest kernels. FILE is configs/llama3_8b.toml by default.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.read import read_config
from titanlite.device import device_of
from titanlite.generation import load
from titanlite.generation.decode import Decoder, Sampling
from titanlite.parallel.initialise import initialise
from titanlite.parallel.process_group import start_process_group
from titanlite.recipes import model_dims

ROWS, LENGTHS, TOKENS = (1, 32), (64, 1024), 24


def draw(model: nn.Module, *_: object) -> None:
    """Draw the weights, where a file would be read."""
    initialise(model, seed=0)


def median_ms(decoder: Decoder, rows: int, length: int) -> tuple[float, float]:
    """Return the milliseconds of the first token, with the prompt, and the median of those after it."""
    prompts, first, later = [[7 + i % 200 for i in range(length)]] * rows, list[float](), list[float]()
    for _ in range(2):
        last = time.perf_counter()
        for n, _ in enumerate(decoder.continue_prompts(prompts, TOKENS, Sampling())):
            now = time.perf_counter()
            (later if n else first).append(1e3 * (now - last))
            last = now
    return first[-1], statistics.median(later)


def floor_ms(model: nn.Module) -> float:
    """Return the milliseconds in which the device reads the weights of the layers and the head."""
    n = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "tok_embeddings" not in name)
    x = torch.empty(min(n, 1 << 33) // 2, dtype=torch.uint8, device="cuda")
    y, times = torch.empty_like(x), list[float]()
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        y.copy_(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times) * n / (2 * x.numel())


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    file = words[0] if words else "configs/llama3_8b.toml"
    load.load_weights_of = draw
    config = read_config(Path(file))[0]
    dims = model_dims(config)
    device = start_process_group(config.comm)
    longest = max(LENGTHS) + TOKENS
    model, mesh = load.load_split_model(config, dims, device_of(device), longest, None, averaged=False)
    floor = floor_ms(model) if device.type == "cuda" else float("nan")
    print(f"{file}: {sum(p.numel() for p in model.parameters()):,} parameters, the weights alone {floor:.2f} ms")
    print(f"{'prompts':>8s} {'context':>8s} {'first, ms':>10s} {'ms':>8s} {'tokens/s':>9s} {'of floor':>9s}")
    decoder = Decoder(model, mesh.device, mesh.tp_group, longest, requires_finite=True, records=device.type == "cuda")
    for rows in ROWS:
        for length in LENGTHS:
            first, ms = median_ms(decoder, rows, length)
            print(f"{rows:8d} {length:8d} {first:10.1f} {ms:8.2f} {1e3 * rows / ms:9.0f} {ms / floor:9.2f}", flush=True)
    if "--profile" in sys.argv:
        for rows in ROWS:
            with torch.profiler.profile() as profile:
                median_ms(decoder, rows, max(LENGTHS))
            print(profile.key_averages().table("self_cuda_time_total", row_limit=24, max_name_column_width=60))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
