"""AdamW and Muon against their floors and torch's: python scripts/bench/optimizer.py

AdamW with clipping, on the shards that one of eight ranks holds of Llama-3 8B. The bytes: 4 per parameter for the norm,
28 for the update (read parameter, gradient and two moments, write parameter and two moments), 20 with moments in
bfloat16, which are widened and narrowed for torch's kernel.

Muon, on the matrices of six layers, whole. The bytes: 20 per parameter (read parameter, gradient and momentum, write
parameter and momentum). The operations: of symmetric products half, at the rate of torch's matmul of 8,192.
torch.optim.Muon takes the same matrices, each a parameter of its own.
"""

from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from titanlite.config.schema import Comm, Optimizer, Parallelism
from titanlite.device import device_of
from titanlite.forecast.update_time import computed_flops
from titanlite.kernels.adamw import AdamWState, adamw
from titanlite.models.matrices import Matrix
from titanlite.optimizers.muon import Muon, MuonRule, Pace
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.process_group import start_process_group
from titanlite.recipes import load

GBPS = 4300  # of a device-to-device copy on one H200, read and write
D, F, V, RANKS = 4096, 14336, 128256, 8
LAYERS = 6
PARTS = {"wqkv": ([D, 1024, 1024], D), "wo": ([D], D), "w13": ([F, F], D), "w2": ([D], F)}
BLOCK = {"wqkv": (6144 // RANKS, D), "wo": (D // RANKS, D), "w13": (2 * F // RANKS, D), "w2": (D // RANKS, F)}


def main() -> None:
    device = start_process_group(Comm())
    shapes = {f"{i}.{name}.weight": shape for i in range(32) for name, shape in BLOCK.items()}
    shapes |= {f"{i}.{name}_norm.weight": (D // RANKS,) for i in range(32) for name in ("attention", "ffn")}
    shapes |= {"tok_embeddings.weight": (V // RANKS, D), "output.weight": (V // RANKS, D), "norm.weight": (D // RANKS,)}
    parameters = {n: torch.nn.Parameter(torch.randn(s, device=device)) for n, s in shapes.items()}
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
    mesh = build_mesh(Parallelism(), device_of(device))
    keep, one = torch.zeros((), device=device), torch.ones((), device=device)
    n = sum(p.numel() for p in parameters.values())
    print(f"{n:,} parameters, milliseconds; the floor at {GBPS} GB/s")
    print("| moments | norm and update | floor | ratio | update | torch's |\n|---|---|---|---|---|---|")
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        optimizer = ShardedOptimizer(parameters, Optimizer(state_dtype=dtype), load("optimizer", "adamw"), mesh, {})
        whole = milliseconds(optimizer, gradients, keep)
        moments = [[torch.zeros_like(p, dtype=getattr(torch, dtype)) for p in parameters.values()] for _ in range(2)]
        tensors = [p.detach() for p in parameters.values()]
        state = AdamWState(tensors, *moments, [0.1] * len(tensors), [len(tensors)], one, 0.9, 0.95, 1e-8)
        ours, torchs = (
            do_bench(partial(update, list(gradients.values()), 0.0, one, keep), return_mode="median")
            for update in (adamw(state), partial(by_torch, state))
        )
        floor = (4 + 12 + 4 * itemsize) * n / GBPS / 1e6
        print(f"| {dtype} | {whole:.2f} | {floor:.2f} | {whole / floor:.2f} | {ours:.2f} | {torchs:.2f} |")
    del parameters, gradients, optimizer, moments, tensors
    time_muon(mesh)


def time_muon(mesh: Mesh) -> None:
    """Print the table of Muon."""
    on = mesh.device
    parameters, matrices = dict[str, torch.nn.Parameter](), dict[str, list[Matrix]]()
    for name in (f"{i}.{name}" for i in range(LAYERS) for name in PARTS):
        rows, columns = PARTS[name.partition(".")[2]]
        parameters[name] = torch.nn.Parameter(torch.randn(sum(rows), columns, device=on) / columns**0.5)
        parts = enumerate(torch.arange(sum(rows)).split(rows))
        matrices[name] = [Matrix(name, str(part), each, columns) for part, each in parts]
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
    rule = MuonRule()
    muon = Muon(parameters, mesh, matrices, rule, dict.fromkeys(parameters, Pace()))
    one, keep = torch.ones((), device=on), torch.zeros((), device=on)
    ours = do_bench(lambda: muon.step(gradients, 1e-3, one, keep), warmup=500, rep=2000, return_mode="median")

    apart = [torch.nn.Parameter(p[m.rows.to(on)].detach().clone()) for n, p in parameters.items() for m in matrices[n]]
    for p in apart:
        p.grad = torch.randn_like(p)
    theirs = torch.optim.Muon(apart, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    torchs = do_bench(theirs.step, warmup=500, rep=2000, return_mode="median")

    x = torch.randn(8192, 8192, device=on, dtype=torch.bfloat16)
    rate = 2 * 8192**3 / do_bench(lambda: x @ x, warmup=200, rep=500, return_mode="median") / 1e9
    tera = sum(computed_flops(*m.shape, len(rule.polynomials)) for of in matrices.values() for m in of) / 1e12
    moved = 20 * sum(p.numel() for p in parameters.values()) / 1e9
    computing, moving = 1e3 * tera / rate, 1e3 * moved / GBPS
    print(f"Muon: {tera:.1f} TFLOP at {rate:.0f} TFLOP/s, {moved:.1f} GB; milliseconds")
    print("| step | floor | of it computing | ratio | torch.optim.Muon |\n|---|---|---|---|---|")
    floor = computing + moving
    print(f"| {ours:.1f} | {floor:.1f} | {computing:.1f} | {ours / floor:.2f} | {torchs:.1f} |")


def milliseconds(optimizer: ShardedOptimizer, gradients: dict[str, Tensor], keep: Tensor) -> float:
    """Return the median time of a clipped step."""

    def step() -> None:
        optimizer.step(gradients, 0.0, optimizer.norm(gradients).clamp(min=1.0), keep)

    return do_bench(step, return_mode="median")  # type: ignore[return-value]


def by_torch(state: AdamWState, gradients: list[Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
    """Run torch's fused AdamW on all tensors at once, with equal weight decays; it wants moments in float32."""
    moments = [state.exp_avg, state.exp_avg_sq]
    wide = [[moment.float() for moment in of_all] for of_all in moments]  # no copies if they are float32
    torch._fused_adamw_(
        state.parameters, gradients, *wide, [], [state.updates] * len(gradients),
        lr=lr, beta1=state.beta1, beta2=state.beta2, weight_decay=state.weight_decays[0], eps=state.eps,
        amsgrad=False, maximize=False, grad_scale=divisor, found_inf=skip,
    )  # fmt: skip
    if state.exp_avg[0] is not wide[0][0]:
        for narrow, updated in zip(moments, wide, strict=True):
            torch._foreach_copy_(narrow, updated)


if __name__ == "__main__":
    main()
