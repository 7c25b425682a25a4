"""`titanlite data`: which documents of which source are trained on when, and what of it is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands.conftest import Call
from tests.support.cpu import cpu_of_children
from titanlite.commands import main
from titanlite.errors import ConfigError
from titanlite.preflight.checked_run import checked_run

DOCUMENTS = {"web": [f"page {n} " + "w" * (n % 7) for n in range(60)], "code": [f"def f{n}(): ..." for n in range(40)]}


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A run on two sources, in two stages."""
    for name, texts in DOCUMENTS.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "run.toml").write_text(
        f"""
        [job]
        dump_folder = "{tmp_path}/outputs"
        [model]
        flavor = "debug"
        [data]
        cache_dir = "{tmp_path}/cache"
        [[data.mixture]]
        name = "web"
        source = "{tmp_path}/web.jsonl"
        weight = 0.75
        [[data.mixture]]
        name = "code"
        source = "{tmp_path}/code.jsonl"
        weight = 0.25
        [training]
        steps = 6
        seq_len = 32
        global_batch_size = 4
        [lr_scheduler]
        warmup_steps = 1
        [[data.stage]]
        from_tokens = 384
        weights = {{ web = 0.5, code = 0.5 }}
        """
    )
    return str(tmp_path / "run.toml")


@pytest.fixture
def sole(file: str, tmp_path: Path) -> list[str]:
    """A run on one source."""
    text = Path(file).read_text()
    text = re.sub(r"\[\[data\.mixture\]\][^[]*|\[\[data\.stage\]\][^[]*", "", text)
    text = text.replace("[data]", f'[data]\nsource = "{tmp_path}/web.jsonl"')
    (tmp_path / "sole.toml").write_text(text)
    return ["data", str(tmp_path / "sole.toml")]


def test_the_run_in_tables(call: Call, file: str) -> None:
    lines = [" ".join(line.split()) for line in call("data", file).splitlines()]
    assert lines[0] == f"{file}: 6 steps, 24 samples, 768 tokens"
    stages = lines.index("stage from step from tokens seq_len sequences a step learning rate weights")
    assert lines[stages + 1 : stages + 3] == [
        "1 0 32 4 0.0003 web 0.75, code 0.25",
        "4 384 32 4 0.000207 web 0.5, code 0.5",  # a cosine, two of five steps on, to a tenth
    ]
    tokens = {name: sum(len(text) + 1 for text in texts) for name, texts in DOCUMENTS.items()}
    trained = {"web": 12 * 24 + 12 * 16, "code": 12 * 8 + 12 * 16}  # 12 samples of 32 tokens in each stage
    for name, documents in (("web", 60), ("code", 40)):
        epochs = trained[name] / (((tokens[name] - 1) // 32) * 32)
        share = f"{trained[name] / 768:.3%}"
        row = f"{name} {tokens[name]:,} {documents} 0 {share} {share} {trained[name]} {epochs:.3g} 0"
        assert row in lines


def test_each_document_of_a_sample(call: Call, file: str) -> None:
    """All samples of the first epoch, put together, are the source."""
    seen: dict[str, dict[int, str]] = {"web": {}, "code": {}}
    for index in range(24):
        text = call("data", file, "--sample", str(index))
        head, _, *rows = text.splitlines()
        found = re.fullmatch(
            rf"sample {index}, of step {index // 4 + 1}: (web|code) \(.*\), epoch (\d), sample (\d+)", head
        )
        assert found, head
        documents = [re.fullmatch(r"  (\d+) +(\d+) +(\d+)  (\w+) +('.*')", row) for row in rows]
        documents = [one for one in documents if one]
        assert sum(int(one[2]) for one in documents) == 32
        whole = "".join(text + "\0" for text in DOCUMENTS[found[1]])
        for one in documents:
            start, length, shown = int(one[3]), int(one[2]), eval(one[5])
            assert whole[start : start + length] == shown
            begins, ends = start == 0 or whole[start - 1] == "\0", shown.endswith("\0")
            assert one[4] == {(1, 1): "whole", (1, 0): "beginning", (0, 1): "end", (0, 0): "middle"}[begins, ends]
            if found[2] == "1":
                assert start not in seen[found[1]]
                seen[found[1]][start] = shown
        ended = sum("\0" in eval(one[5]) for one in documents)
        assert f"  {32 - ended} targets" in text
    assert all(len(of) > 10 for of in seen.values())


def test_a_sample_of_whole_documents_has_padding(call: Call, sole: list[str]) -> None:
    text = call(*sole, "--data.packing", "best_fit", "--sample", "2")
    rows = [line.split() for line in text.splitlines()[2:-2]]
    assert [row[3] for row in rows] == ["whole"] * len(rows)
    padded = 32 - sum(int(row[1]) for row in rows)
    targets = f"{32 - padded - len(rows)} targets; none behind the last token of {len(rows)} documents"
    assert targets + (f"; {padded} token" if padded else "\n") in text
    assert "% of plain causal attention" in text


def test_without_a_mask_nothing_is_left_out(call: Call, sole: list[str]) -> None:
    text = call(*sole, "--data.document_mask", "false", "--sample", "2")
    assert "  32 targets\n  attention across documents (data.document_mask = false): 100.0% of" in text


def test_a_step_is_all_its_samples(call: Call, file: str) -> None:
    text = call("data", file, "--step", "2")
    assert re.findall(r"^sample (\d+), of step 2", text, re.MULTILINE) == ["4", "5", "6", "7"]
    last = text.splitlines()[-1]
    assert re.fullmatch(
        r"step 2: 4 samples \(web 3, code 1\)|step 2: 4 samples \(code 1, web 3\)",
        last.partition(", ")[0] + ", " + last.split(", ")[1],
    ), last
    assert last.endswith("targets of 128 tokens")


def test_the_mask_as_a_picture(call: Call, sole: list[str], tmp_path: Path) -> None:
    import matplotlib.image

    path = tmp_path / "new" / "mask.png"
    assert call(*sole, "--sample", "2", "--picture", str(path)).endswith(f"{path}\n")
    masked = matplotlib.image.imread(path)[..., :3]
    call(*sole, "--sample", "2", "--picture", str(path), "--data.document_mask", "false")
    plain = matplotlib.image.imread(path)[..., :3]

    def coloured(pixels) -> int:  # not black, grey or white
        return int((pixels.max(-1) - pixels.min(-1) > 0.2).sum())

    assert 0 < coloured(masked) < 0.7 * coloured(plain)


def test_token_files_are_shown_as_ids(call: Call, sole: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(range(1, 201)))
    argv = [*sole, "--data.source", str(tmp_path / "t.bin"), "--training.seq_len=8", "--training.global_batch_size=2"]
    argv += ["--model.vocab_size=60032"]
    text = call(*argv, "--sample", "0")
    assert "its documents are not known: data.separator_id is not given\n  [" in text
    separator = ["--data.separator_id", re.findall(r"\[\d+ (\d+)", text)[0]]
    documents = [re.split("  +", call(*argv, *flags).splitlines()[6])[3] for flags in ((), separator)]
    assert documents == ["not known", "2"]
    ended = call(*argv, "--sample", "0", *separator)
    assert " beginning " in ended or " end " in ended


def test_a_mixture_is_prepared_and_packed_by_source(call: Call, file: str, tmp_path: Path) -> None:
    text = call("prepare", file, "--data.packing", "best_fit")
    assert text.count("data.packing = best_fit; both, of ") == 2
    assert "of 60 documents:" in text
    assert "of 40 documents:" in text
    assert len(list((tmp_path / "cache").glob("*.packed-32-0"))) == 2


def test_documents_are_packed_for_one_length(call: Call, file: str) -> None:
    path = Path(file)
    path.write_text(path.read_text().replace("from_tokens = 384", "from_tokens = 384\n        seq_len = 16"))
    said = call("data", file, "--data.packing", "best_fit", ends=2)
    assert 'data.packing = "best_fit"\n' in said
    assert 'want: "concat" where stages have several seq_len (16, 32)' in said
    lines = [" ".join(line.split()) for line in call("data", file).splitlines()]
    assert "4 384 16 4 0.000207 web 0.5, code 0.5" in lines
    assert re.search(r"sample \d+, tokens (0 to 16|16 to 32) of it\n", call("data", file, "--sample", "20"))


def test_what_depends_on_ranks_and_what_is_not_reached_is_said(call: Call, file: str) -> None:
    path = Path(file)
    path.write_text(path.read_text().replace("global_batch_size = 4", "local_batch_size = 4"))
    assert "--step = 1\n      want: --world N as well" in call("data", file, "--step", "1", ends=2)
    assert "step 1: 8 samples" in call("data", file, "--step", "1", "--world", "2")
    assert "that of the fewest ranks; pass --world N" in call("data", file)
    said = call("data", file, "--world", "2", "--training.steps", "2")
    assert "fewest ranks" not in said
    assert "data.stage[0] is not reached: it begins with step 3" in " ".join(said.split())


def test_it_answers_in_a_moment_and_without_torch(file: str, call: Call) -> None:
    call("data", file)
    code = "import sys; from titanlite.commands import main; x = main(sys.argv[1:]); print(*sys.modules); sys.exit(x)"
    with cpu_of_children(2.0):
        command = [sys.executable, "-c", code, "data", file, "--step", "1"]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    assert not {"torch", "matplotlib", "datasets"} & set(done.stdout.splitlines()[-1].split())


def test_a_source_of_a_mixture_has_one_name_in_messages_and_its_line(file: str, tmp_path: Path) -> None:
    text = Path(file).read_text().replace(f"{tmp_path}/code.jsonl", f"{tmp_path}/none.jsonl")
    Path(file).write_text(text)
    line = next(n for n, of in enumerate(text.splitlines(), 1) if "none.jsonl" in of)
    with pytest.raises(ConfigError, match=rf"line {line}  data\.mixture\[1\]\.source = '.*none\.jsonl', which matches"):
        checked_run([file])


def test_a_window_and_a_background_are_said_everywhere(
    call: Call, sole: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--data.shuffle_window", "40", "--data.prepare", "background"]
    said = "not shuffled: a data.shuffle_window of 40 tokens has one sample of 32"
    ahead = "tokenized in the background, at most 2,000,000,000 tokens ahead"
    assert f"{said}; {ahead}" in " ".join(call("validate", *sole[1:], *more).split())
    assert main([*sole, *more]) == 0
    told = capsys.readouterr()
    assert said in " ".join(told.out.split())
    assert "web.jsonl: tokenized to its end first, for which a run does not wait" in told.err
    main([*sole, *more])
    assert "tokenized to its end" not in capsys.readouterr().err  # it is there
    assert said in " ".join(call("prepare", *sole[1:], *more).split())
