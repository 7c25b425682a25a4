"""What is wrong with a user's model file is one message, with its line, the exception and what was called."""

import re
from pathlib import Path

import pytest

from tests.support.launched import SMALL, Desk
from tests.support.own_model import Change, mine
from titanlite.commands import main

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")
BEGINS_FORWARD = "x = self.tok_embeddings(tokens)"
ENDS_BLOCK = "return h + self.feed_forward(normed)"
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
RETURNED = r"line \d+  Mine.forward = returned "
# The line that is changed, its change, and what is said: {} is the number of the changed line, and its code follows.
WRONG: dict[str, tuple[Change, str]] = {
    "no Python": (
        (ENDS_BLOCK, "return h +"),
        r"line {}  return h \+ = SyntaxError: .*\n +want: a Python file that can",
    ),
    "an import that ends the process": (
        ("INIT_STD = 0.02", "INIT_STD = exit(0)"),
        r"line {}  in <module>: INIT_STD = exit\(0\) = SystemExit: 0\n +want: a Python file that can be imported",
    ),
    "no model": (
        (FILL, FILL.replace("fill_", "fil_")),
        'model.file = ".*", with no such class\n +want: one class with',
    ),
    "an __init__ of one": (
        ("(self, dims: ModelDims, seq_len: int)", "(self, dims: ModelDims, *, length: int)"),
        r"line {}  Mine.__init__ = TypeError: .*\n +want: Mine\(sizes, seq_len\) to build",
    ),
    "no super().__init__": (
        ("        super().__init__()\n        self.dims, self", "        self.dims, self"),
        r"line \d+  in __init__: self.tok_embeddings = .* = AttributeError: cannot assign module before",
    ),
    "two models": ((HEAD, f"{HEAD}\n\n\nclass Other(Mine): ..."), 'model.file = ".*", with Mine, Other\n'),
    "layers in a list": (("nn.ModuleList(", "list("), r"Mine.layers = list\n +want: an nn.ModuleList\n"),
    "no norm": (("self.norm ", "self.nrm "), r"Mine.norm = NoneType\n +want: an nn.Module\n"),
    "a forward of two": (
        (FORWARD, FORWARD.replace("tokens: Tensor", "tokens, mask")),
        r"line {}  Mine.forward = TypeError: .*'mask'\n +want: Mine.forward\(tokens\) to run, also on tensors without",
    ),
    "a fill_buffers of one": (
        (FILL, FILL.replace("(self)", "(self, device)")),
        r"line {}  Mine.fill_buffers = TypeError: missing a required argument: 'device'\n +want: fill_buffers\(\) to",
    ),
    "a shape that does not fit": (
        (BEGINS_FORWARD, f"{BEGINS_FORWARD} @ tokens.new_ones(3, 3)"),
        r"line {}  in forward: .* = RuntimeError: .*\n +want: Mine.forward\(tokens\) to run",
    ),
    "logits of the width of a block": (
        (HEAD, "return self.norm(x)"),
        r"line \d+  Mine.forward = logits of shape \[512, 256\]\n +want: \[512, 320\]: \[M, V\]",
    ),
    "logits of the last token": (
        (HEAD, "return self.output(self.norm(x)[-1:])"),
        r"line \d+  Mine.forward = logits of shape \[1, \d+\]\n +want: \[512, \d+\]: \[M, V\]",
    ),
    "two results": ((HEAD, f"{HEAD}, x"), rf"{RETURNED}tuple of a tensor \[\d+, 256\], a tensor"),
    "nothing": ((HEAD, HEAD.removeprefix("return ")), f"{RETURNED}NoneType"),
    "no gradient": (
        (HEAD, f"{HEAD}.detach()"),
        rf"{RETURNED}a tensor without a gradient\n +want: logits that depend on weights",
    ),
}


def line_of(folder: Path, code: str) -> int:
    (number,) = [n for n, text in enumerate((folder / "mine.py").read_text().splitlines(), 1) if code in text]
    return number


@pytest.mark.parametrize("case", WRONG)
def test_validate_tells_it(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = WRONG[case]
    flags = ["--model.vocab_size=320"] if "width" in case else []
    assert main(["validate", DEBUG, *mine(tmp_path, change), *flags]) == 2
    said = capsys.readouterr().err.partition(f"{tmp_path}/mine.py: 1 problem\n  ")[2]
    assert re.match(message.replace("{}", str(line_of(tmp_path, change[1])) if "{}" in message else ""), said), said


def ended(desk: Desk, folder: Path, changes: list[Change], *flags: str, world: int = 1) -> str:
    """What a run of such a model says on rank 0, behind the path of its file."""
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in SMALL if key.startswith("model.")]:  # which are the recipe's
            patch.delitem(SMALL, key)
        run = desk.run(folder.name, world, *mine(folder, *changes), "--job.stop_after=2", *flags, ends=2)
    assert "Traceback" not in run.output
    said = run.output.partition(f"{folder}/mine.py: 1 problem\n")[2]
    assert said, run.output
    return said.partition("--- rank 1")[0]


# What only a run comes to: backward between blocks, values of buffers, and tensors that are left on the meta device.
OF_A_RUN = {
    "in backward": ([(HEAD, HEAD.replace("x", "Broken.apply(x)")), ("class Block(", f"{BACKWARD}\n\nclass Block(")],
        "return grad @ grad", "RuntimeError: mat1 and mat2 shapes"),
    "in fill_buffers": ([("table = rope_table(self.seq_len", "table = rope_tables(self.seq_len")],
        "table = rope_tables", "NameError: name 'rope_tables'"),
    "a tensor that is no buffer": ([(FILL, f"    two = torch.ones(1, device='meta')\n\n{FILL}"),
        (HEAD, "return self.output(self.norm(x * self.two))")], "self.norm(x * self.two)", "RuntimeError: "),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_A_RUN)
def test_what_a_run_comes_to(case: str, desk: Desk, tmp_path: Path) -> None:
    changes, instead, error = OF_A_RUN[case]
    said = ended(desk, tmp_path, changes)
    where = rf"  line {line_of(tmp_path, instead)}  in \w+: .*{re.escape(instead)}.* = {re.escape(error)}.*\n"
    want = r" +want: a model that runs: tokens \[M\] to logits \[M, V\], and \[M, D\] between its modules\n"
    found = re.match(where + want + r" +fix:  change that line; the whole traceback is in (.*)\n", said)
    assert found, said
    assert "Traceback (most recent call last)" in Path(found[1]).read_text()
    status = desk.folder / "runs" / tmp_path.name / "status.json"
    assert '"ConfigError"' in status.read_text()


def test_what_the_compiler_meets_in_a_block(desk: Desk, tmp_path: Path) -> None:
    instead = "torch._dynamo.graph_break(); return h + self.feed_forward(normed)"
    said = ended(desk, tmp_path, [(ENDS_BLOCK, instead)], "--compile.enable=true")
    assert said.startswith(f"  line {line_of(tmp_path, instead)}  in forward: {instead} = "), said


@pytest.mark.parametrize("layout", ["tensor_parallel_degree", "data_parallel_shard_degree"])
def test_all_ranks_say_it_as_one(layout: str, desk: Desk, tmp_path: Path) -> None:
    instead = "return h + self.feed_forwards(normed)"
    said = ended(desk, tmp_path, [(ENDS_BLOCK, instead)], f"--parallelism.{layout}=2", world=2)
    assert said.startswith(f"  line {line_of(tmp_path, instead)}  in forward: {instead} = AttributeError"), said


def test_what_a_collective_raises_is_not_told_as_the_users(desk: Desk, tmp_path: Path) -> None:
    """As where FSDP gathers, which a line of the user's file calls, too."""
    barrier = "if not x.is_meta: torch.distributed.barrier(group='none')"
    change = BEGINS_FORWARD, f"{BEGINS_FORWARD}\n        {barrier}"
    run = desk.run(tmp_path.name, 1, *mine(tmp_path, change), "--job.stop_after=2", "--model.dim=256", ends=1)
    assert "Traceback (most recent call last)" in run.output
