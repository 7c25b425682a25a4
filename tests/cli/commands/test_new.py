"""titanlite new: for each machine a config that passes and fits by the forecast; what it asks and refuses."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch

from tests.cli.commands.conftest import Call
from tests.support.needs import slow
from titanlite.commands import main, new, new_choices
from titanlite.commands.new_choices import Choices, UnfitError, fitted_batch, fitted_learning_rate
from titanlite.commands.new_wishes import Wishes, wished_model
from titanlite.config.schema import Model
from titanlite.errors import ConfigError
from titanlite.models.experts import count_parameters
from titanlite.models.find import build_model
from titanlite.preflight.machine import Machine, machine_named
from titanlite.recipes import load

MACHINES = {
    "1 x 80 GB": (("--gpu", "h100", "--world", "1"), "h100"),
    "8 x 80 GB": (("--gpu", "h100", "--world", "8"), "h100"),
    "4 x 141 GB": (("--device-gib", "141", "--world", "4"), "h200"),
    "16 x 80 GB": (("--gpu", "h100", "--network", "eth100", "--world", "16"), "h100"),
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Something to train on, beside where the file is written."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(100_000)))
    return "text.txt"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("1 x 80 GB", "1B"),
        ("4 x 141 GB", "1B"),
        ("16 x 80 GB", "1B"),
        *slow(("8 x 80 GB", "1B"), ("8 x 80 GB", "llama3-8B"), ("4 x 141 GB", "qwen3-8B")),
    ],
)
def test_on_gpus_the_file_passes_fits_and_says_what_plan_says(call: Call, text: str, name: str, model: str) -> None:
    flags, device = MACHINES[name]
    said = call("new", "mine.toml", "--model", model, "--data", text, "--tokens", "300B", *flags)
    world = flags[-1]
    assert call("validate", "mine.toml", "--world", world).startswith("mine.toml: ")
    network = [word for word in flags if word in ("--network", "eth100")]
    plan = call("plan", "mine.toml", "--world", world, "--device", device, *network, "--json", "plan.json")
    assert f"fits NVIDIA {device.upper()}" in plan
    written, planned = Path("mine.toml").read_text(), json.loads(Path("plan.json").read_text())
    config = tomli.loads(written)
    assert ("linked by 100 Gb/s Ethernet (RoCE)" in said) == bool(network)
    assert ("data_parallel_replicate_degree" in config.get("parallelism", {})) == bool(network)
    speed = f"{planned['tokens_per_second_per_gpu']:,.0f} tokens a second and GPU"
    assert speed in said
    assert speed in " ".join(written.replace("#", "").split())
    training = config["training"]
    trained = training["steps"] * training["global_batch_size"] * training["seq_len"]
    assert trained == pytest.approx(300e9, rel=1e-3)
    days = trained / (86_400 * planned["tokens_per_second_per_gpu"] * int(world))
    assert f"tokens take {days:.1f} days" in said
    assert config["data"] == {"source": text, "max_tokens": 300 * 10**9, "tokenizer": "bytes"}
    assert config["model"]["vocab_size"] == 256  # of 128,256 rows most would never be used
    for line in written.splitlines():
        assert len(line) <= 100
        if " = " in line and not line.startswith("#"):
            assert written[: written.index(line)].splitlines()[-1].startswith(("#", "[")), line  # with its reason


def test_attention_within_documents_of_prepared_data_is_priced_as_plan_prices_it(call: Call, text: str) -> None:
    short = "".join(json.dumps({"text": f"{n} is followed by {n + 1}. " * 20}) + "\n" for n in range(9000))
    Path("short.jsonl").write_text(short)
    wished = "--model", "1B", "--data", "short.jsonl", "--tokens", "300B", "--gpu", "h100", "--world", "1"
    unknown = call("new", "before.toml", *wished)
    call("prepare", "before.toml")
    known = call("new", "after.toml", *wished)
    call("plan", "after.toml", "--world", "1", "--device", "h100", "--json", "plan.json")
    planned = json.loads(Path("plan.json").read_text())
    assert planned["attended_share"] < 0.5
    speed = f"{planned['tokens_per_second_per_gpu']:,.0f} tokens a second and GPU, MFU {planned['mfu']:.0%}"
    assert speed in known
    assert speed not in unknown


def test_in_a_terminal_it_asks_until_an_answer_is_one(
    call: Call, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titanlite.commands.new._is_terminal", lambda: True)
    monkeypatch.setattr("titanlite.preflight.machine.shows_gpus", lambda: False)
    monkeypatch.setattr("titanlite.commands.new_models.names", lambda _: ["llama3-debug"])
    answers = ["llama3-9B", "list", "", "nosuch.txt", text, "train:9", "train:300", "many", "2_000_000"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
    assert main(["new"]) == 0
    out, asked = capsys.readouterr()
    listed, wrote, said = out.partition("wrote llama3-debug.toml, for 1 process on a CPU")
    assert listed.splitlines()[-1].startswith("  llama3-debug")
    assert wrote
    assert asked.count("model, as llama3-8B; list: all, with memory and time [llama3-debug]: ") == 3
    assert asked.count("hf:<dataset> [python_stdlib]: ") == 2
    assert asked.count("tokenizer.json [bytes]: ") == 2
    assert "want: train:N with a number of ids from 257" in asked
    assert f"{text}: about " in asked.rpartition("tokens, as 20B; 0")[0]  # before the tokens are asked for
    assert asked.count("20 for each parameter that a token uses [0]: ") == 2
    assert "want: a number of tokens from 1 to 1e+18, as 20B, 500M or 1.5e9" in asked
    config = tomli.loads(Path("llama3-debug.toml").read_text())
    assert config["data"]["source"] == text
    assert config["data"]["max_tokens"] == 2_000_000
    assert f"{config['data']['tokenizer']}: 300 ids, trained on all of its " in said
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # closed: nobody answers
    assert main(["new", "other.toml"]) == 130


def test_the_text_is_counted_and_a_tokenizer_trained_once(
    call: Call, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wished = "--model", "debug", "--data", text, "--tokens", "20M", "--tokenizer", "train:300", *ON_CPU
    said, n_bytes = call("new", "mine.toml", *wished), Path(text).stat().st_size
    (file,) = Path("tokenizers").iterdir()
    config = tomli.loads(Path("mine.toml").read_text())
    assert config["data"]["tokenizer"] == str(file)
    assert config["model"]["vocab_size"] == 384
    written, before = " ".join(Path("mine.toml").read_text().replace("#", "").split()), file.stat().st_mtime_ns
    assert f"{file}: 300 ids, trained on all of its 2.8 MB\n" in said
    assert "300 ids, trained on all of its 2.8 MB; keep the file" in written
    main(["new", "again.toml", *wished])
    again, err = capsys.readouterr()
    assert re.search(r'\nwarning: data.source = "text.txt": [\d.]+ epochs in [\d,]+ steps; from the fifth on ', err)
    assert f"{file}: 300 ids, trained on this text before\n" in again
    assert file.stat().st_mtime_ns == before

    prepared = call("prepare", "mine.toml", "--data.cache_dir=cache", "--data.max_tokens=0")
    tokens = int(re.findall(r"tokens +([\d,]+) as uint16", prepared)[0].replace(",", ""))
    estimate, each, n_epochs = re.findall(
        r"about ([\d.]+) million tokens, ([\d.]+) bytes of text each, counted in all of its 2.8 MB\. "
        r"20 million tokens are ([\d.]+) epochs",
        written,
    )[0]
    assert float(estimate) * 1e6 == pytest.approx(tokens, rel=0.01)
    assert float(each) == pytest.approx(n_bytes / tokens, rel=0.01)
    assert float(n_epochs) == pytest.approx(20e6 / tokens, rel=0.01)
    assert "million tokens are" in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("small.txt", "100,001 tokens. 204,800 tokens are 2.05 epochs"),
        ("ids.bin", "100,000 tokens. 204,800 tokens are 2.05 epochs"),
        ("hf:a/b", "not counted, as the hub does not give it to this host"),
    ],
)
def test_what_needs_no_sample_or_has_none_is_told_as_it_is(
    call: Call, text: str, source: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("small.txt").write_text("x" * 100_000)
    Path("ids.bin").write_bytes(bytes(200_000))
    monkeypatch.setattr("titanlite.commands.new_text.knows_dataset", lambda name: name != "a/b")
    flags = "--model", "debug", "--data", source, "--tokens", "204800", *ON_CPU
    assert f"{source}: {said}\n" in call("new", "mine.toml", *flags)
    if source == "ids.bin":
        refused = call("new", "other.toml", *flags, "--tokenizer", "train:300", ends=2)
        assert "want: no train:N for token files such as 'ids.bin'" in refused


def test_models_are_listed_with_what_they_take_or_why_they_do_not_fit(
    call: Call, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["llama3-70B", "llama3-8B", "llama3-1B", "llama3-debug"]
    monkeypatch.setattr("titanlite.commands.new_models.names", lambda _: names)
    main(["new", "--model", "list", "--data", text, "--gpu", "h100", "--tokens", "20B"])
    out, err = capsys.readouterr()
    assert "for one GPU, as --world is not given; --world 8 plans for a host of 8\n" in err
    first, head, *rows, too_large, following = out.splitlines()
    assert first.startswith(f"{text}: about 2.78 million tokens, ")
    assert head.split() == ["model", "parameters", "tokens", "epochs", "of", "each", "GPU", "time"]
    assert [row.split()[0] for row in rows] == ["llama3-debug", "llama3-1B"]
    said = call("new", "mine.toml", "--model", "1B", "--data", text, "--gpu", "h100", "--world", "1", "--tokens", "20B")
    lasts = re.findall("20 billion tokens take (.*)\n", said)[0]
    assert re.fullmatch(rf" +llama3-1B +974 million +20 billion +7,2\d\d +[\d.]+ GiB +{lasts}", rows[1])
    least = r"at least [\d.]+ GiB on each; it fits with --world \d+"
    assert re.fullmatch(rf"2 do not fit: llama3-8B \({least}\), llama3-70B", too_large)
    assert following == f"next: titanlite new --data {text} --model llama3-1B --gpu h100 --tokens 20B"
    assert sorted(os.listdir()) == ["mine.toml", text]


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Let a terminal be there, and somebody give answers."""
    monkeypatch.setattr("titanlite.commands.new._is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))


ON_CPU = "--gpu", "cpu", "--device-gib", "64"


def test_a_model_that_does_not_fit_is_refused_at_its_question(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "8B", "debug", text, "", "2_000_000")
    assert main(["new", *ON_CPU]) == 0
    questions = capsys.readouterr().err.split("]: ")
    assert [question.rpartition("\n")[2].partition(" ")[0] for question in questions[:-1]] == [
        *("model,", "model,", "data:", "tokenizer:", "tokens,")
    ]
    assert "want: a model that fits 1 process on a CPU" in questions[1]
    answer(monkeypatch)  # no question is asked
    assert main(["new", "mine.toml", "--model", "8B", *ON_CPU]) == 2


def test_answers_are_kept_where_the_model_does_not_fit_with_them(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(name: str, wishes: Wishes, machine: Machine) -> Choices:
        if (wishes.model, wishes.tokens) == ("debug", 2_000_000):  # with all answers
            raise UnfitError.of("command line", "--model", wishes.model, "a model that fits", "a smaller model")
        return choose(name, wishes, machine)

    choose = new_choices.choose_run
    monkeypatch.setattr(new_choices, "choose_run", too_large)
    answer(monkeypatch, "debug", text, "", "2_000_000", "qwen3-debug")
    assert main(["new", *ON_CPU]) == 0
    assert capsys.readouterr().err.count("hf:<dataset> [python_stdlib]: ") == 1
    config = tomli.loads(Path("qwen3-debug.toml").read_text())
    assert (config["model"]["name"], config["data"]["source"]) == ("qwen3", text)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_tokenizer_that_another_machine_has_need_not_be_here(
    call: Call, text: str, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    if is_asked:
        answer(monkeypatch, "/there/tokenizer.json")
    flags = () if is_asked else ("--tokenizer", "/there/tokenizer.json")
    said = call("new", "mine.toml", "--model", "qwen3-debug", "--data", text, "--tokens", "2M", *flags, *ON_CPU)
    vocabulary = load("model", "qwen3-debug").vocab_size
    assert f"/there/tokenizer.json is not here: the vocabulary is the model's, {vocabulary:,} ids\n" in said
    config = tomli.loads(Path("mine.toml").read_text())
    assert config["data"]["tokenizer"] == "/there/tokenizer.json"
    assert config["model"].get("vocab_size", vocabulary) == vocabulary


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "9B"), "one of 1B, 3B, 405B, 70B, 8B, debug"),
        (("--model", "8B", "--data", "nosuch.txt"), "nosuch.txt"),
        (("--tokens", "20x"), "--tokens 20B"),
        (("--tokenizer", "train:many"), "fix:  --tokenizer train:8192"),
        (("--tokenizer", "train:256"), "want: train:N with a number of ids from 257 "),
        (("--tokenizer", "nosuch.json"), "nosuch.json"),
        (("--world", "0"), "a number of GPUs, at least 1"),
        (("--device-gib", "much"), "the GiB of a GPU"),
        (("--tokens", "0"), "a number of tokens from 1 to"),
        (("--tokens", "0.5"), "a number of tokens from 1 to"),
        (("--tokens", "1e999"), "a number of tokens from 1 to"),
        (("--gpu", "Z80"), "want: one of h100, h200, a100, a100-40gb, b200, cpu"),
        (("--gpu", "Z80", "--device-gib", "80"), "want: one of h100, h200, a100, a100-40gb, b200, cpu"),
        (("--gpu", "h100", "--world", "20"), "fix:  --world 16 or --world 24"),
        (("--gpu", "h100", "--world", "16", "--network", "ib200"), "want: ib400, eth200, eth100: of others"),
        (("--gpu", "h100", "--world", "8", "--network", "eth200"), "the GPUs of one host need no network"),
        (("--gpu", "cpu", "--world", "16", "--network", "eth200"), "the speed of CPUs is guessed without a network"),
        (("--gpu", "h100", "--model", "8B"), "fix:  --world 2, or a smaller model: titanlite recipes model"),
        (("--gpu", "cpu", "--model", "8B", "--device-gib", "64"), "fix:  a smaller model: titanlite recipes model"),
        (("--model", "9B", "--data", "nosuch.txt", "--tokenizer", "nosuch.json"), "nosuch.txt"),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_imported_and_nothing_is_written(
    call: Call, text: str, flags: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not says.endswith("titanlite recipes model"):  # which is told by the forecast
        monkeypatch.setattr("titanlite.commands.new.at_work", lambda _: pytest.fail("loads torch"))
    assert says in call("new", "--model", "debug", "--data", text, *flags, ends=2)
    assert os.listdir() == [text]


def test_every_flag_that_is_wrong_is_said_at_once(call: Call, text: str) -> None:
    flags = {
        "--tokens": "x",
        "--world": "0",
        "--gpu": "h10",
        "--model": "9B",
        "--tokenizer": "train:5",
        "--data": "no.txt",
    }
    said = call("new", "runs/mine.toml", *(word for flag in flags.items() for word in flag), ends=2)
    heads = [line.split(" = ")[0].strip() for line in said.splitlines() if re.match("  [^ ]|[^ ]", line)]
    assert heads == [
        "command line: 6 problems",
        *("--tokens", "--world", "--gpu", "model.flavor", "--tokenizer", "FILE", "data: 1 problem", "data.source"),
    ]
    # What another flag decides is not said of a wrong one.
    said = call("new", "--data", text, "--world", "x", "--network", "eth100", "--device-gib", "much", ends=2)
    assert said.startswith("command line: 3 problems\n")
    assert "--gpu" not in said
    assert "--network" not in said


@pytest.mark.parametrize(
    ("named", "there", "said"),
    [
        (["mine.toml"], "mine.toml", "FILE = mine.toml\n      want: a file that does not exist\n"),
        ([], "llama3-debug.toml", "FILE = llama3-debug.toml\n      want: a file that does not exist\n"),
        (["mine.toml"], "outputs/mine/config.toml", "want: a name that no run has: outputs/mine is there\n"),
        (["runs/mine.toml"], "text", "runs does not\n      fix:  mkdir -p runs, or name another\n"),
    ],
)
def test_what_is_there_stays_and_a_folder_is_not_made(
    call: Call, text: str, named: list[str], there: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.commands.new.at_work", lambda _: pytest.fail("loads torch"))
    Path(there).parent.mkdir(parents=True, exist_ok=True)
    Path(there).write_text("mine")
    assert said in call("new", *named, "--model", "debug", "--data", text, "--gpu", "cpu", ends=2)
    assert Path(there).read_text() == "mine"


def test_what_checks_the_flags_needs_no_torch() -> None:
    program = "import sys, titanlite.commands.new, titanlite.preflight.machine as m; m.machine_named('a100', None, 8)"
    subprocess.run([sys.executable, "-c", f"{program}; sys.exit('torch' in sys.modules)"], check=True)


def test_the_start_is_the_same_on_the_terminal_and_in_the_file(call: Call, text: str) -> None:
    said = call("new", "mine.toml", "--model", "1B", "--data", text, "--gpu", "h200", "--world", "64")
    start = "torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py"
    assert said.endswith(f"      {start} --config mine.toml\n")
    in_file = Path("mine.toml").read_text().replace("\\\n#", "")
    assert f"{start} --config mine.toml" in " ".join(in_file.split())


@pytest.mark.parametrize(
    ("part", "fix"),
    [
        ("30B-A3B", "did you mean --model qwen3_moe-30B-A3B?"),
        ("A22B", "did you mean --model qwen3_moe-235B-A22B?"),
        ("qwen3_moe", "--model qwen3_moe-235B-A22B, or another of them"),
    ],
)
def test_part_of_a_name_is_answered_with_the_names_that_have_it(part: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--model = {part}")) as e:
        wished_model(part)
    assert f"fix:  {fix}" in str(e.value)


def test_the_learning_rate_is_that_of_the_paper() -> None:
    """DeepSeek LLM, table 2: 4.2e-4 of 7B and 3.2e-4 of 67B on 2.0 trillion tokens."""
    assert fitted_learning_rate(6 * 6.9e9 * 2e12) == 4e-4
    assert fitted_learning_rate(6 * 67e9 * 2e12) == 3e-4
    assert fitted_learning_rate(1e12) == fitted_learning_rate(1e17)


def test_the_batch_is_a_power_of_two_and_no_larger_than_any_that_was_tried() -> None:
    """8B on 161 billion tokens would have 529 sequences by the law; 405B on 8 trillion 57 million tokens."""
    assert [fitted_batch(compute, 8192) for compute in (1e13, 8.3e21, 2.2e25)] == [1, 512, 1024]


@pytest.mark.parametrize(("model", "world"), [("llama3-1B", 2), *slow(("llama3-70B", 16))])
def test_the_gain_of_float8_is_the_same_when_asked_again(model: str, world: int) -> None:
    """Of a layout with tensor parallelism, too; a terminal chooses for each answer."""
    wishes, machine = Wishes(model, "python_stdlib", "bytes", 0, True), machine_named("h100", None, world)
    first, second = (new_choices.choose_run("new", wishes, machine) for _ in range(2))
    assert first.float8 == second.float8
    assert first.float8 is not None
    assert first.float8 > 1.05
    assert (first.chosen.degree > 1) == (world == 16)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_the_guess_for_a_cpu_is_of_one_thread_per_process(
    call: Call, text: str, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """As training computes. More processes than cores share these."""
    threads: list[int] = []

    def peak_flops(*_: object) -> tuple[float, str]:
        threads.append(torch.get_num_threads())
        return 1e11, ""

    before = torch.get_num_threads()
    monkeypatch.setattr(new_choices, "peak_flops", peak_flops)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said = call("new", "mine.toml", "--model", "debug", "--data", text, *ON_CPU, "--world", str(world))
    speed = int(re.findall(r"([\d,]+) tokens a second and process, MFU 20%", said)[0].replace(",", ""))
    flops = 1e11 * min(1, 2 / world) * new_choices.CPU_MFU / speed
    assert 6 * 1.5e6 < flops < 6 * 2e6  # of one of the model's tokens
    assert set(threads) == {1}
    assert torch.get_num_threads() == before


def test_a_mixture_takes_tokens_by_the_parameters_of_a_token(call: Call, text: str) -> None:
    """Compute goes by these, and the rule of 20 is of dense models; no key says so alone."""
    call("new", "mine.toml", "--model", "mixtral-debug", "--data", text, "--gpu", "h100", "--world", "2")
    written = " ".join(Path("mine.toml").read_text().replace("#", "").split())
    config = tomli.loads(Path("mine.toml").read_text())
    dims = load("model", "mixtral-debug")
    _, active = count_parameters(build_model(Model(name="mixtral"), dims, 1))
    training = config["training"]
    tokens = training["steps"] * training["global_batch_size"] * training["seq_len"]
    assert tokens == pytest.approx(20 * active, rel=0.05)
    assert "million parameters, of which a token uses " in written
    assert config["optimizer"]["lr"] == 4e-4  # and not a dense model's, at which its router may spike
    assert "for dense models 0.002, by" in written
    assert "20 for each parameter that a token uses, " in written
    assert "the best use of compute for dense models" in written
    assert "ranks that share the experts of a layer out: 2 is " in written
    assert config["parallelism"]["expert_parallel_degree"] == 1
    assert "nothing else is possible" not in written.partition("[parallelism]")[2].partition("[")[0]


def test_an_interrupt_leaves_no_file_that_was_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("titanlite.preflight.checked_run.checked_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new._write_checked(tmp_path / "mine.toml", "", 1, lacks_tokenizer=False, tokens=None)
    assert not list(tmp_path.iterdir())
