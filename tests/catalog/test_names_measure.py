"""The ids that public training configurations mention resolve as far as the catalog says."""

from __future__ import annotations

import re

import names
import pytest
from napkinmath.catalog.models import find_row

IDS = names.read_ids()
TYPED = names.read_typed()
OF_2026 = names.read_typed(names.NAMES_OF_2026, "2026")
UNDERSTATED = {"HuggingFaceTB/cosmo-1b"}  # 1.74B parameters, as its config.json has them
LEAST = {  # question: (known to the rules or a trace, known or refused by a reason)
    "mentions in training configs": (0.92, 0.98),
    "ids in training configs": (0.81, 0.94),
    "popular ids": (0.89, 0.96),
    "popular ids of text models": (0.95, 0.99),
    "ids typed by heart": (0.84, 0.88),
    "names typed in 2026": (0.64, 0.9),
}


def test_the_list_is_of_ids_with_counts() -> None:
    assert len(IDS) > 1000 and len({one.id for one in IDS}) == len(IDS)
    for one in IDS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.id)
        assert (one.mentions == 0) == (one.repositories == 0) and one.kind in ("text", "multimodal")
        assert one.mentions >= one.repositories and (one.mentions or one.lists >= 2)


@pytest.mark.parametrize("question", LEAST)
def test_names_resolve(question: str) -> None:
    found = names.questions([*IDS, *TYPED, *OF_2026])[question]
    known, answered = LEAST[question]
    assert found["priced"] + found["trace only"] >= known
    assert 1 - found["unknown"] >= answered
    assert sum(found.values()) == pytest.approx(1)


def test_what_a_person_types_is_an_id() -> None:
    assert len(TYPED) > 500 and len({one.id.lower() for one in TYPED}) == len(TYPED)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", one.id) for one in TYPED)


def test_a_size_in_an_id_is_that_of_the_model_it_means() -> None:
    """'-7b' of an id and the billions that the row counts: a wrong model would be of another size.
    Published names round down by up to 1.56 (Voxtral Mini 3B has a tower of its own)."""
    compared = 0
    for one in [*IDS, *TYPED]:
        row, name = find_row(one.id), one.id.split("/")[1].lower()
        sizes = re.findall(r"(?<![\w.])(\d+(?:[._]\d+)?)b(?![a-z\d])", name)
        if row is None or len(sizes) != 1 or re.search(r"\d+x\d|-\d+e", name):
            continue
        if one.id in UNDERSTATED:
            continue
        said = float(sizes[0].replace("_", "."))
        assert 0.8 <= row["parameters"] / 1e9 / said <= 1.57, (one.id, row["name"])
        compared += 1
    assert compared > 500
