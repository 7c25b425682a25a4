"""An exception out of a user's model file ends a run in one message, with the line and what is expected."""

import re
from pathlib import Path

import pytest

from tests.support.launched import SMALL, Desk
from tests.support.own_model import Change, mine

BEGINS_FORWARD = "x = self.tok_embeddings(tokens)"
ENDS_BLOCK = "return h + self.feed_forward(normed)"
ENDS_INIT = 'self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)'
FORWARD = "    def forward(self, tokens: Tensor, sequences: Sequences | None = None) -> Tensor:"
FILL = "    def fill_buffers(self) -> None:"
HEAD = "return self.output(self.norm(x))"
BACKWARD = """
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad
"""


@pytest.fixture(autouse=True)
def _no_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the recipe's."""
    for key in [key for key in SMALL if key.startswith("model.")]:
        monkeypatch.delitem(SMALL, key)


def ended(desk: Desk, folder: Path, changes: list[Change], *flags: str, world: int = 1) -> str:
    """What a run of such a model says on rank 0, behind the path of its file."""
    run = desk.run(folder.name, world, *mine(folder, *changes), "--job.stop_after=2", *flags, ends=2)
    assert "Traceback" not in run.output
    said = run.output.partition(f"{folder}/mine.py: 1 problem\n")[2]
    assert said, run.output
    return said.partition("--- rank 1")[0]


def line_of(folder: Path, code: str) -> int:
    (number,) = [n for n, text in enumerate((folder / "mine.py").read_text().splitlines(), 1) if code in text]
    return number


# In the run's first step, in a method of the model, in a block, in backward, in what is called before the first step.
RAISED = {
    "a shape that does not fit": (
        BEGINS_FORWARD,
        f"{BEGINS_FORWARD} @ torch.ones(3, 3)",
        "RuntimeError: mat1 and mat2",
    ),
    "an attribute that is not there": (ENDS_BLOCK, "return h + self.feed_forwards(normed)", "AttributeError: "),
    "an exception of its own": (BEGINS_FORWARD, 'raise KeyError("mine")', "KeyError: 'mine'"),
    "in backward": (HEAD, HEAD.replace("x", "Broken.apply(x)"), "RuntimeError: mat1 and mat2 shapes"),
    "in fill_buffers": (
        "table = rope_table(self.seq_len",
        "table = rope_tables(self.seq_len",
        "NameError: name 'rope_tables'",
    ),
}


@pytest.mark.parametrize("case", RAISED)
def test_what_is_raised_in_a_step(case: str, desk: Desk, tmp_path: Path) -> None:
    line, instead, error = RAISED[case]
    changes = [(line, instead)]
    if case == "in backward":
        changes.append(("class Block(", f"{BACKWARD}\n\nclass Block("))
        instead = "return grad @ grad"
    said = ended(desk, tmp_path, changes)
    where = rf"  line {line_of(tmp_path, instead)}  in \w+: {re.escape(instead)}.* = {re.escape(error)}.*\n"
    want = r" +want: a model that runs: tokens \[M\] to logits \[M, V\], and \[M, D\] between its modules\n"
    found = re.match(where + want + r" +fix:  change that line; the whole traceback is in (.*)\n", said)
    assert found, said
    log = Path(found[1])
    assert "Traceback (most recent call last)" in log.read_text()
    status = desk.folder / "runs" / tmp_path.name / "status.json"
    assert '"ConfigError"' in status.read_text()


@pytest.mark.parametrize("case", ["an attribute that is not there", "an exception of its own"])
def test_what_the_compiler_meets_in_a_block(case: str, desk: Desk, tmp_path: Path) -> None:
    instead = RAISED[case][1]
    said = ended(desk, tmp_path, [(ENDS_BLOCK, instead)], "--compile.enable=true")
    assert said.startswith(f"  line {line_of(tmp_path, instead)}  in forward: {instead} = "), said


@pytest.mark.parametrize(
    "layout", ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"]
)
def test_all_ranks_say_it_as_one(layout: str, desk: Desk, tmp_path: Path) -> None:
    instead = "return h + self.feed_forwards(normed)"
    said = ended(desk, tmp_path, [(ENDS_BLOCK, instead)], layout, world=2)
    assert said.startswith(f"  line {line_of(tmp_path, instead)}  in forward: {instead} = AttributeError"), said


def test_what_a_collective_raises_is_not_told_as_the_users(desk: Desk, tmp_path: Path) -> None:
    """As where FSDP gathers, which a line of the user's file calls, too."""
    change = BEGINS_FORWARD, f"torch.distributed.barrier(group='none')\n        {BEGINS_FORWARD}"
    run = desk.run(tmp_path.name, 1, *mine(tmp_path, change), "--job.stop_after=2", ends=1)
    assert "Traceback (most recent call last)" in run.output


REQUIRED: dict[str, tuple[Change, str]] = {
    "no forward": (
        (FORWARD, FORWARD.replace("forward", "run")),
        r"line \d+  Mine.forward = nothing\n +want: def forward\(self, tokens\), which .*\n +fix:  write def forward",
    ),
    "a misspelt forward": (
        (FORWARD, FORWARD.replace("forward", "foward")),
        r"line {FORWARD}  Mine.forward = nothing\n.*\n +fix:  def forward\(self, tokens\) in place of foward",
    ),
    "a forward of two": (
        (FORWARD, FORWARD.replace("tokens: Tensor", "tokens, mask")),
        r"line {FORWARD}  Mine.forward = forward\(self, tokens, mask, .*\).*: missing a required argument: 'mask'\n",
    ),
    "a forward of none": (
        (FORWARD, "    def forward(self) -> Tensor:"),
        r"line {FORWARD}  Mine.forward = forward\(self\).*: too many positional arguments\n",
    ),
    "a forward of sequences alone": (
        (FORWARD, FORWARD.replace(", tokens: Tensor", "")),
        r"line {FORWARD}  Mine.forward = forward\(self, sequences.*: multiple values for argument 'sequences'\n",
    ),
    "a misspelt fill_buffers": (
        (FILL, FILL.replace("fill_buffers", "fill_bufers")),
        r"line {FILL}  Mine.fill_bufers\n +want: one class with a method .*\n +fix:  fill_buffers in place of",
    ),
    "a fill_buffers of one": (
        (FILL, FILL.replace("(self)", "(self, device)")),
        r"line {FILL}  Mine.fill_buffers = fill_buffers\(self, device\).*: missing a required argument: 'device'\n",
    ),
    "a misspelt part": (
        ("self.norm ", "self.nrm "),
        r"Mine.norm = nothing\n +want: an nn.Module\n +fix:  self.norm in place of self.nrm",
    ),
    "an __init__ of one": (
        ("(self, dims: ModelDims, seq_len: int)", "(self, dims: ModelDims, *, length: int)"),
        r"line \d+  Mine.__init__ = TypeError: .*\n +want: Mine\(sizes, seq_len\) to build",
    ),
    "no super().__init__": (
        ("        super().__init__()\n        self.dims, self", "        self.dims, self"),
        r"line \d+  in __init__: self.tok_embeddings = .* = AttributeError: cannot assign module before",
    ),
    "an import that ends the process": (
        ("INIT_STD = 0.02", "INIT_STD = exit(0)"),
        r"line \d+  in <module>: INIT_STD = exit\(0\) = SystemExit: 0\n +want: a Python file that can be imported",
    ),
    "a module that is not installed": (
        ("import torch\n", "import torch\nimport no_such_module\n"),
        r"line \d+  in <module>: import no_such_module = ModuleNotFoundError: No module",
    ),
    "logits of the width of a block": (
        (HEAD, "return self.norm(x)"),
        r"line {FORWARD}  Mine.forward = logits of shape \[128, 256\]\n +want: \[128, 320\]: \[M, V\]",
    ),
    "logits of the last token": (
        (HEAD, "return self.output(self.norm(x)[-1:])"),
        r"line {FORWARD}  Mine.forward = logits of shape \[1, 256\]\n +want: \[128, 256\]: \[M, V\]",
    ),
    "two results": ((HEAD, f"{HEAD}, x"), r"line {FORWARD}  Mine.forward = returned tuple of a tensor"),
    "nothing": ((HEAD, f"{HEAD.removeprefix('return ')}"), r"line {FORWARD}  Mine.forward = returned NoneType"),
    "no gradient": (
        (HEAD, f"{HEAD}.detach()"),
        r"line {FORWARD}  Mine.forward = returned a tensor without a gradient\n +want: logits that depend on weights",
    ),
}


@pytest.mark.parametrize("case", REQUIRED)
def test_what_a_run_asks_of_the_file(case: str, desk: Desk, tmp_path: Path) -> None:
    change, message = REQUIRED[case]
    flags = ["--model.vocab_size=320"] if "width" in case else []
    said = ended(desk, tmp_path, [change], *flags)
    lines = [n for n, text in enumerate((tmp_path / "mine.py").read_text().splitlines(), 1) if text in change[1:]]
    for name, code in {"{FORWARD}": FORWARD, "{FILL}": FILL}.items():
        if name in message:
            message = message.replace(name, str(lines[0] if lines else line_of(tmp_path, code)))
    assert re.match(f"  {message}", said), said
