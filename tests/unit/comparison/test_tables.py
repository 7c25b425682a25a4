from titanlite.comparison.runs import RunRecord
from titanlite.comparison.tables import receipt_differences, receipt_table, speed_table


def entry(feature: str, requested: object, applied: object, *skipped: tuple[str, str]) -> dict:
    cases = [{"what": what, "why": why} for what, why in skipped]
    return {"feature": feature, "requested": requested, "applied": applied, "skipped": cases}


def run(name: str, receipt: list[dict] | None = None, rates: tuple[float | None, ...] = (), **row: float) -> RunRecord:
    step = {"tokens": 1, "loss": 1.0, **row}
    rows = [{"step": i, "tokens_per_second_per_gpu": rate, **step} for i, rate in enumerate(rates, 1)]
    return RunRecord(name, rows, {}, "", receipt)


def test_receipts_differ_in_what_was_applied_and_in_what_was_skipped() -> None:
    same = entry("compile", True, "blocks")
    wo, w2 = ("wo", "narrow"), ("w2", "narrow")
    one = run("one", [same, entry("float8", "rowwise", {"layers": 224, "lowering": "fused"}, wo)])
    two = run("two", [same, entry("float8", "rowwise", {"layers": 223, "lowering": "fused"}, wo, w2)])
    none = run("none")
    assert receipt_differences([one, two, none]) == [
        ("float8: applied.layers", ["224", "223", "no receipt"]),
        ("float8: skipped, narrow", ["1: wo", "2: wo, w2", "no receipt"]),
    ]
    assert receipt_differences([one, none]) == []
    assert receipt_differences([one, run("empty", [same])])[0] == ("float8: requested", ['"rowwise"', "-"])


def test_a_receipt_is_a_row_a_feature() -> None:
    assert receipt_table([entry("float8", None, {"layers": 2, "by": {"wq": 1}}, ("wo", "narrow"))]) == [
        ["float8", "-", 'layers: 2\nby: {"wq": 1}', "wo: narrow"]
    ]
    assert receipt_table(None) is None


def test_speed_is_the_median_beside_the_first_run_s_and_memory_the_peak() -> None:
    first = run("first", rates=(90.0, 100.0, None, 1000.0), memory_gib=1.5)
    first.rows[0]["memory_gib"] = 2.5
    table = speed_table([first, run("second", rates=(150.0,)), run("silent")])
    assert [row[:3] for row in table] == [
        ["run", "tok/s/GPU", "of the first's"],
        ["first", "100", "100.0%"],
        ["second", "150", "150.0%"],
        ["silent", "-", "-"],
    ]
    assert table[1][table[0].index("reserved, GiB")] == "2.50"
    assert speed_table([first])[0][:3] == ["run", "tok/s/GPU", "TFLOP/s/GPU"]
