import json

import pytest

from titanlite.errors import StrictError
from titanlite.receipt import Entry, Receipt, Skipped


def fail(text):
    raise AssertionError(text)


def test_the_file_has_exactly_the_fields_of_the_contract(tmp_path):
    receipt = Receipt()
    entry = Entry(
        "float8",
        "rowwise",
        {"layers": 7},
        count=7,
        skipped=[Skipped("output", "float8.filter_fqns")],
        missed=[Skipped("layers.0.wo", "dim 100 is no multiple of 16")],
        key="float8.recipe",
    )
    receipt.add(entry)
    receipt.add(Entry("attention", "auto", "flash", count=4))
    receipt.write(tmp_path / "receipt.json")
    assert json.loads((tmp_path / "receipt.json").read_text()) == [
        {
            "feature": "float8",
            "requested": "rowwise",
            "applied": {"layers": 7},
            "skipped": [
                {"what": "output", "why": "float8.filter_fqns"},
                {"what": "layers.0.wo", "why": "dim 100 is no multiple of 16"},
            ],
        },
        {"feature": "attention", "requested": "auto", "applied": "flash", "skipped": []},
    ]
    assert len(list(tmp_path.iterdir())) == 1


def test_requested_and_applied_nowhere_stops_a_strict_run_in_the_words_of_the_key():
    receipt = Receipt()
    receipt.add(Entry("float8", "rowwise", 0, count=0, skipped=[Skipped("wqkv", "dim 100")], key="float8.recipe"))
    with pytest.raises(StrictError) as error:
        receipt.enforce(True, fail)
    assert str(error.value) == (
        "a requested feature was not fully applied: 1 problem\n"
        '  float8.recipe = "rowwise"\n'
        "      want: applied at least once; it was never applied\n"
        "            wqkv: dim 100\n"
        "      fix:  change float8.recipe or what the reason names; job.strict = false trains with what was applied"
    )


def test_an_eligible_case_that_was_missed_stops_it_too_and_a_declared_one_does_not():
    receipt = Receipt()
    receipt.add(Entry("parallelism.async_tensor_parallel", True, 5, count=5, skipped=[Skipped("wo", "tuning table")]))
    receipt.enforce(True, fail)
    receipt.add(Entry("compile.enable", True, 3, count=3, missed=[Skipped("block 3", "graph break")]))
    with pytest.raises(StrictError, match=r"compile\.enable = true\n.*all 4 eligible cases; it missed 1\n.*block 3"):
        receipt.enforce(True, fail)


def test_all_problems_come_at_once_and_long_lists_are_cut():
    receipt = Receipt()
    receipt.add(Entry("a.x", "on", 0, count=0))
    receipt.add(Entry("a.y", "on", 1, count=1, missed=[Skipped(f"layer {i}", "why") for i in range(20)]))
    receipt.add(Entry("a.z", "on", 1, count=1, missed=[Skipped(f"layer {i}", "why") for i in range(8)]))
    with pytest.raises(StrictError, match=r"3 problems(.|\n)*layer 7: why\n +and 12 more(.|\n)*layer 7: why\n +fix:"):
        receipt.enforce(True, fail)


def test_without_strict_the_same_text_is_one_warning():
    receipt = Receipt()
    receipt.add(Entry("a.x", "on", 0, count=0))
    receipt.add(Entry("a.y", "on", 0, count=0))
    with pytest.raises(StrictError) as error:
        receipt.enforce(True, fail)
    seen: list[str] = []
    receipt.enforce(False, seen.append)
    assert seen == [str(error.value)]


@pytest.mark.parametrize("value", [None, False, 0, "", "none", "off", "disabled"])
def test_what_was_not_asked_for_need_not_be_applied(value):
    receipt = Receipt()
    receipt.add(Entry("float8.recipe", value, 0, count=0, missed=[Skipped("x", "y")]))
    receipt.enforce(True, fail)


def test_a_summary_is_one_line_without_what_has_a_row_for_each_layer():
    receipt = Receipt()
    each = {f"layers.{i}.attention.wo": "fused" for i in range(128)}
    receipt.add(Entry("float8", "rowwise", {"layers": 128, "each": each, "fsdp_all_gather": "float8"}, count=128))
    receipt.add(Entry("attention", "fused", "cudnn_attention", count=1))
    lines = [entry.summary() for entry in receipt.entries]
    assert lines == ["float8: layers 128, fsdp_all_gather float8", "attention: cudnn_attention"]


def test_a_summary_names_what_was_left_out_and_why():
    receipt, why = Receipt(), "sizes (257, 128), 64 tokens: not all multiples of 16"
    wide = [Skipped(f"layers.{i}.feed_forward.w2", "no") for i in range(128)]
    receipt.add(Entry("float8", "rowwise", {"layers": 384}, count=384, skipped=wide, missed=[Skipped("output", why)]))
    receipt.add(Entry("a", "on", 5, count=5, skipped=[Skipped(f"x{i}", "no") for i in range(9)]))
    receipt.add(Entry("b", "on", 5, count=5, skipped=[Skipped("x", f"reason {i}") for i in range(9)]))
    assert [entry.summary() for entry in receipt.entries] == [
        f"float8: layers 384; except layers.*.feed_forward.w2 (no), output ({why})",
        "a: 5; except x0, x1, x2, 6 more (no)",
        "b: 5; except x (reason 0), x (reason 1), x (reason 2), 6 more",
    ]


def test_news_is_what_a_default_config_does_not_ask_for_or_what_was_left_out():
    left, told = Skipped("/a.py", "why"), Skipped("x", "why", is_told=True)
    for entry, is_news in (
        (Entry("compile", False, "off", count=0), False),
        (Entry("optimizer", "adamw", {}, count=1, key="optimizer.recipe"), False),
        (Entry("optimizer", "muon", {}, count=1, key="optimizer.recipe"), True),
        (Entry("data.source", "python_stdlib", {}, count=1, skipped=[told]), False),
        (Entry("data.source", "python_stdlib", {}, count=1, skipped=[left]), True),
        (Entry("data.mixture", ["a"], {}, count=1), True),
        (Entry("attention", "fused", "math", count=1, key="model.n_heads", default="fused"), False),
        (Entry("parallelism", [1, -1, 2], {}, count=1, default=[1, -1, 1]), True),
        (Entry("fsdp_copy_engines", None, {}, count=1, missed=[left]), True),
    ):
        assert entry.is_news is is_news, entry
    applied = {"tokens": 29_759_019, "bad": 0, "masked": True, "each": {"a": 1}}
    files = Entry("data.source", "x", applied, count=1, skipped=[left, Skipped("/b.py", "why"), Skipped("c", "why")])
    assert files.summary(is_brief=True) == "data.source: tokens 29,759,019, masked True; except c, 2 files (why)"
    nothing = Entry("parity", False, {"tensors": 0}, count=0, skipped=[Skipped("model.file", "why")])
    assert nothing.summary(is_brief=True) == "parity: tensors 0; except model.file (why)"


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("layers.11.attention.wqkv", "layers.*.attention.wqkv"),
        ("layers.0", "layers.0"),
        ("/usr/lib/python/3.11.7/test/a.1.py: not UTF-8", None),
        ("layers.3.jsonl: not UTF-8", None),
        ("part.3.jsonl", None),
        ("all_gather 4.5 MiB", None),
    ],
)
def test_blocks_are_taken_together_in_names_of_modules_alone(what, shown):
    entry = Entry("a", "on", 5, count=5, skipped=[Skipped(what, "why")])
    assert entry.summary() == f"a: 5; except {shown or what} (why)"
