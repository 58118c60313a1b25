"""Names, widths and rows. `tests/e2e` uses a database."""

import pytest

from tests.export.records import later, reading, use
from webhook.core.errors import GpuwardenError
from webhook.export.tables import Tables, clipped, merged_uses, reading_row, width


@pytest.mark.defect("gpuid-10")
@pytest.mark.parametrize(
    ("text", "readings", "uses"),
    [
        ("gpu", '"gpu"', '"gpu_use"'),
        ("Serials", '"Serials"', '"Serials_use"'),
        ("public.gpu", '"public"."gpu"', '"public"."gpu_use"'),
        ('a "b"; DROP', '"a ""b""; DROP"', '"a ""b""; DROP_use"'),
    ],
)
def test_table_name_is_used_as_written(text: str, readings: str, uses: str) -> None:
    tables = Tables.named(text)
    assert (tables.readings.as_string(), tables.uses.as_string()) == (readings, uses)


@pytest.mark.defect("gpuid-10")
@pytest.mark.parametrize("text", ["", ".gpu", "gpu.", "a.b.c", "x" * 56, "ä" * 28, "a\0b"])
def test_invalid_table_name_is_refused(text: str) -> None:
    with pytest.raises(
        GpuwardenError, match=r"is not a table name; allowed: NAME or SCHEMA\.NAME, at most 55 bytes each"
    ):
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
def test_shortened_text_fits_and_ends_in_a_digest(text: str, size: int, found: str) -> None:
    assert clipped(text, size).startswith(found)
    assert len(clipped(text, size).encode()) <= size


def test_texts_with_equal_prefix_stay_different_when_shortened() -> None:
    assert clipped("x" * 100 + "a", 63) != clipped("x" * 100 + "b", 63)


@pytest.mark.parametrize(("kind", "size"), [("character varying(255)", 255), ("text", None), ("integer", None)])
def test_a_columns_width_is_read_from_its_type(kind: str, size: int | None) -> None:
    assert width(kind) == size


def test_missing_key_columns_are_empty_not_null() -> None:
    row = reading_row(reading(uuid=None, pci_bus_id=None, model=None))
    assert (row["uuid"], row["pci_bus_id"], row["model"]) == ("", "", None)


class TestMergedUses:
    def test_start_and_end_merge_into_one_use(self) -> None:
        assert merged_uses([use(), use(until=later(60))]) == [use(until=later(60))]

    def test_order_of_records_does_not_matter(self) -> None:
        assert merged_uses([use(until=later(60)), use()]) == [use(until=later(60))]

    def test_recorded_end_stays(self) -> None:
        assert merged_uses([use(until=later(60)), use(until=later(90))]) == [use(until=later(60))]

    def test_missing_values_are_filled_from_the_other_record(self) -> None:
        whole = merged_uses([use(serial="1", pod=None), use(since=later(-5), chassis="2")])
        assert whole == [use(serial="1", chassis="2", since=later(-5))]

    def test_two_gpus_of_a_reservation_are_two_uses(self) -> None:
        both = [use(), use(gpu_uuid="GPU-1")]
        assert merged_uses(both) == both
