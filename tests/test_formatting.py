"""Numbers, names and tables as text."""

from math import nan

from manyheads.formatting import listed, percent, plain_table, standard_error


def test_many_names_are_counted() -> None:
    names = [f"L0N{index}" for index in range(23)]
    assert listed(names[:2]) == "L0N0, L0N1"
    assert listed(names).endswith("L0N19 and 3 more")


def test_a_percentage_that_rounds_to_zero_has_no_sign() -> None:
    assert [percent(value) for value in (-1e-5, -0.0, -6e-5, 1e-5)] == [
        *("0.00%", "0%", "−0.01%", "0.00%")
    ]


def test_an_unknown_standard_error_is_empty() -> None:
    assert (standard_error(0.0123), standard_error(None), standard_error(nan)) == ("0.012", "", "")


def test_numbers_of_a_table_are_on_the_right() -> None:
    table = plain_table(["head"], ["loss", "±"], [["L0H1", "2.5", ""], ["L0H2", "2.6", "0.1"]])
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
    assert table.row_count == 2
