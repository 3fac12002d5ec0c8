"""Where the result is made, and what is said of that before it is."""

from __future__ import annotations

from pathlib import Path

from dist_consolidate.output_place import find_place

OUT = Path("/local/out")


def test_what_is_known_before_the_folder_is_made() -> None:
    place = find_place("b", ["a", "a", "b", "b"])
    assert place.publisher == 2
    assert place.notes(None, OUT) == ["/local/out: is on b (rank 2)"]
    assert place.forecast([2, 3], OUT) == []
    assert place.forecast([2, 1, 0], OUT) == [
        "/local/out: will be made on b; ranks 0, 1 on other hosts will write only if they see it "
        "there"
    ]
