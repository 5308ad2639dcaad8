"""/openapi.json tells the truth: schemathesis writes bodies by it, those that it allows and those that it forbids, and the answers
are what it says. `--bodies`: of how many in all (tests/server/test_fuzz.py has its share)."""

import pytest
from maga_transformer.server.openapi import document
from maga_transformer.server.openapi_bodies import BODIES
from maga_transformer.server.routes import routes

from .fuzzing import FUZZ, POSTED, Tally

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import assume, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

GenerationMode = schemathesis.GenerationMode
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def schema(fuzzed):
    loaded = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")
    loaded.config.generation.allow_x00 = True
    return loaded


def test_every_route_is_described():
    table = routes(generates=True)
    described = document(table, keys=True)["paths"]
    for route in table:
        for method in route.methods:
            operation = described[route.path.replace(":path}", "}")][method.lower()]
            assert operation["summary"] or route.path == "/page/{name}", route.path
            takes_body = method == "POST" and route.path in POSTED
            assert takes_body == ("requestBody" in operation) == (takes_body and route.endpoint in BODIES), route.path


def test_the_document_is_one(schema):
    schema.validate()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("path", POSTED)
def test_bodies_by_the_document(fuzzed, schema, path, mode, request):
    share = max(3, request.config.getoption("--bodies") // 6 // (2 * len(POSTED)))
    tally = Tally()
    checks = [*CHECKS, *([negative_data_rejection] if mode is GenerationMode.NEGATIVE else [])]

    @settings(FUZZ, max_examples=share)
    @given(schema[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case):
        assume("timeout_ms" not in str(case.body))  # what it allows may be too little
        tally.add(case.call_and_validate(base_url=fuzzed.url, checks=checks).status_code)

    ask()
    tally.show(path)
