"""Text that is folded into a width."""

from titanlite.text_table import columns, folded

ROWS = (
    ("name", "shape", "why it is so"),
    ("first", "4×8", "annotation of the file"),
    ("second.weight", "16×8", "rest"),
)


def test_rows_break_between_the_same_columns() -> None:
    text = f"all weights of a model, by name\n{columns(*ROWS)}\n"
    assert folded(text, None) == text
    assert folded(text, 80) == text
    assert folded(text, 26) == (
        "all weights of a model, by\n"
        "name\n"
        "  name           shape\n"
        "    why it is so\n"
        "  first            4×8\n"
        "    annotation of the file\n"
        "  second.weight   16×8\n"
        "    rest\n"
        "\n"
    )


def test_a_word_that_is_wider_is_not_cut() -> None:
    path = "/srv/runs/of-a-long-name/metrics.jsonl"
    assert folded(f"wrote {path}\n{columns((path, 'why'))}", 20) == f"wrote\n{path}\n  {path}\n    why\n"


def test_a_cell_that_is_wider_than_all_is_folded_itself() -> None:
    assert folded(columns(("it has a matmul in high precision",)), 20) == (
        "  it has a matmul in\n      high precision\n"
    )
