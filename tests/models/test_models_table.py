"""docs/models.md names every family as it is; that each case is its family's, test_families.py says."""

from maga_transformer.models import families
from models_table import ELSEWHERE, FILE, read_table, table
from tiny_families import NATIVE, RELAID


def test_the_table_is_of_these_families_and_cases() -> None:
    stated = read_table()
    assert FILE.read_text(encoding="utf-8") == table(stated), "run tests/models_table.py"
    assert sorted(case for own in stated.values() for case in own.cases) == sorted({*NATIVE, *RELAID})
    tested = ELSEWHERE.keys() | {kind for kind, own in stated.items() if own.cases}
    assert {family.model_type for family in families().values()} == tested
