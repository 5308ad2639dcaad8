"""docs/api.md says what the server does."""

from api_docs import FILE, document


def test_the_document_is_of_this_code():
    assert FILE.read_text(encoding="utf-8") == document(), "run tests/api_docs.py"
