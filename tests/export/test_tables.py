"""Names, widths and rows; what a database makes of them is in `tests/e2e`."""

import pytest

from tests.export.records import later, reading, use
from webhook.core.errors import GpuwardenError
from webhook.export.tables import Tables, clipped, merged_uses, reading_row, width


@pytest.mark.defect("S2-10")
@pytest.mark.parametrize(
    ("text", "readings", "uses"),
    [
        ("gpu", '"gpu"', '"gpu_use"'),
        ("Serials", '"Serials"', '"Serials_use"'),
        ("public.gpu", '"public"."gpu"', '"public"."gpu_use"'),
        ('a "b"; DROP', '"a ""b""; DROP"', '"a ""b""; DROP_use"'),
    ],
)
def test_a_table_is_called_as_it_is_written(text: str, readings: str, uses: str) -> None:
    tables = Tables.named(text)
    assert (tables.readings.as_string(), tables.uses.as_string()) == (readings, uses)


@pytest.mark.defect("S2-10")
@pytest.mark.parametrize("text", ["", ".gpu", "gpu.", "a.b.c", "x" * 56, "ä" * 28, "a\0b"])
def test_what_cannot_be_a_table_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(GpuwardenError, match=r"is no table: allowed are NAME and SCHEMA\.NAME, 55 bytes each"):
        Tables.named(text)


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [
        ("short", 63, "short"),
        ("x" * 63, 63, "x" * 63),
        ("x" * 64, 63, "x" * 50 + "~7ce100971f64"),
        ("ä" * 40, 63, "ä" * 25 + "~"),
    ],
)
def test_a_clipped_text_fits_and_tells_of_the_rest(text: str, size: int, found: str) -> None:
    assert clipped(text, size).startswith(found)
    assert len(clipped(text, size).encode()) <= size


def test_texts_that_begin_alike_stay_different_when_they_are_clipped() -> None:
    assert clipped("x" * 100 + "a", 63) != clipped("x" * 100 + "b", 63)


@pytest.mark.parametrize(("kind", "size"), [("character varying(255)", 255), ("text", None), ("integer", None)])
def test_a_columns_width_is_read_from_its_type(kind: str, size: int | None) -> None:
    assert width(kind) == size


def test_what_is_missing_is_no_null_in_the_key() -> None:
    row = reading_row(reading(uuid=None, pci_bus_id=None, model=None))
    assert (row["uuid"], row["pci_bus_id"], row["model"]) == ("", "", None)


class TestOneOfEach:
    def test_a_beginning_and_its_end_are_one(self) -> None:
        assert merged_uses([use(), use(until=later(60))]) == [use(until=later(60))]

    def test_whatever_comes_first(self) -> None:
        assert merged_uses([use(until=later(60)), use()]) == [use(until=later(60))]

    def test_an_end_that_was_said_stays(self) -> None:
        assert merged_uses([use(until=later(60)), use(until=later(90))]) == [use(until=later(60))]

    def test_what_only_one_of_them_knows_is_known(self) -> None:
        whole = merged_uses([use(serial="1", pod=None), use(since=later(-5), chassis="2")])
        assert whole == [use(serial="1", chassis="2", since=later(-5))]

    def test_two_gpus_of_a_reservation_are_two_uses(self) -> None:
        both = [use(), use(gpu_uuid="GPU-1")]
        assert merged_uses(both) == both
