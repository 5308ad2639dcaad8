"""Keys on every route but health, the administrator's key, and what browsers may do."""

import ssl
import statistics
import time

import httpx
import pytest
import trustme
from maga_transformer.request import RequestError
from maga_transformer.server.auth import ADMIN_PATHS, OPEN_PATHS, Keys, is_open
from maga_transformer.server.routes import routes

from .conftest import demo_model, running_server

KEYS = {
    "MAGA_API_KEY": "sk-canary-7,sk-canary-8",
    "MAGA_ADMIN_API_KEY": "sk-admin-9",
    "ALLOWED_ORIGINS": "https://page.example",
    "ROOT_PATH": "/llm",  # routes are told apart behind a proxy's path too
}


@pytest.fixture(scope="module")
def guarded():
    with running_server(demo_model(), **KEYS) as server:
        yield server
        assert not any("canary" in line or "sk-admin" in line for line in server.lines), "a key was printed"


def test_every_route_wants_a_key(guarded):
    table = [(method, route.path) for route in routes(generates=True) for method in route.methods]
    assert len(table) > 50
    others = ["//v1/models", "/v1/models/", "/V1/models", "/x/../update", "/%75pdate", "/docs", "/openapi.json"]
    for method, path in [*table, *[("GET", path) for path in others]]:
        path = path.replace("{name:path}", "x")
        answer = guarded.client.request(method, guarded.url + path)
        if is_open(method, path):
            assert answer.status_code != 401, path
        else:
            assert answer.status_code == 401, (method, path, answer.status_code)
        assert "canary" not in answer.text


@pytest.mark.parametrize(
    "header", [{"Authorization": "Bearer sk-canary-7"}, {"authorization": "bearer sk-canary-8"}, {"x-api-key": "sk-canary-7"}]
)
def test_any_of_the_keys_opens(guarded, header):
    assert guarded.get("/v1/models", headers=header).status_code == 200
    assert guarded.get("/metrics", headers=header).status_code == 200
    assert "canary" not in guarded.get("/metrics", headers=header).text


def test_a_slash_behind_a_route_is_the_route_itself(guarded):
    """No client has to follow a redirect, which many do without the body or the key; an administrator's route stays one."""
    keys = {"x-api-key": "sk-canary-7"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
    bodies = {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "Hi", "max_tokens": 2}, "/tokenize": {"prompt": "Hi"}}
    for path, body in bodies.items():
        answers = [guarded.post(where, body, headers=keys) for where in (path, path + "/")]
        assert [answer.status_code for answer in answers] == [200, 200], path
        assert guarded.post(path + "/", body).status_code == 401
    assert guarded.get("/v1/models/", headers=keys).json()["data"] == guarded.get("/v1/models", headers=keys).json()["data"]
    assert guarded.get("/health/").status_code == 200 and guarded.get("/").status_code == 200
    assert guarded.post("/update/", {}, headers=keys).status_code == 403
    for path in ("/v1/nothing/", "/v1/completions//"):
        answer = guarded.post(path, bodies["/v1/completions"], headers=keys)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("key", ["", "sk-canary", "sk-canary-77", "SK-CANARY-7", "ü", "x" * 10000])
def test_wrong_keys(guarded, key):
    answer = guarded.client.get(guarded.url + "/v1/models", headers={"x-api-key": key.encode()})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/v1/messages").json()["error"]["type"] == "authentication_error"


def test_the_administrators_key(guarded):
    for path in ("/server_info",):
        assert guarded.get(path, headers={"x-api-key": "sk-canary-7"}).status_code == 403
        answer = guarded.get(path, headers={"Authorization": "Bearer sk-admin-9"})
        assert answer.status_code == 200 and "canary" not in answer.text and "sk-admin" not in answer.text
        assert answer.json()["settings"]["api_key"]["value"] == "2 set"
    assert guarded.post("/set_log_level", {"log_level": "ERROR"}, headers={"x-api-key": "sk-canary-7"}).status_code == 403
    admin = {"x-api-key": "sk-admin-9"}
    assert guarded.post("/set_log_level", {"log_level": "INFO"}, headers=admin).status_code == 200
    assert guarded.post("/set_log_level", {"log_level": "LOUD"}, headers=admin).status_code == 400
    assert guarded.get("/v1/models", headers=admin).status_code == 200


def test_health_is_open(guarded):
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/health/ready").json() == "ok"
    assert guarded.client.head(guarded.url + "/health").status_code == guarded.client.head(guarded.url + "/").status_code == 200


def test_cross_origin(guarded, server):
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = guarded.client.options(guarded.url + "/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = guarded.get("/v1/models", headers={"Origin": "https://page.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://page.example"
    other = guarded.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "https://page.example"}).headers


def test_without_keys_nothing_is_asked(server):
    assert (
        server.get("/v1/models").status_code == server.get("/server_info").status_code == server.get("/version").status_code == 200
    )


def test_head_where_get_is(server):
    """Probes like `wget --spider` send it."""
    for path in ("/", "/health", "/v1/models"):
        found = server.client.head(server.url + path)
        assert (
            found.status_code == 200 and not found.content and found.headers["content-length"] == str(len(server.get(path).content))
        )
    assert server.client.head(server.url + "/v1/completions").status_code == 405


def test_the_time_tells_nothing():
    """Of keys with no and with all but one right letters: the difference of the means is within the noise of a shared machine."""
    key = "k" * 40
    keys = Keys([key], [])

    def seconds(given):
        scope = {"path": "/v1/models", "method": "GET", "headers": [(b"x-api-key", given.encode())]}
        began = time.perf_counter_ns()
        with pytest.raises(RequestError):
            keys.check(scope)
        return time.perf_counter_ns() - began

    near, far = [], []
    for _ in range(2000):
        near.append(seconds("k" * 39 + "x"))
        far.append(seconds("x" * 40))
    assert abs(statistics.median(near) - statistics.median(far)) < 0.25 * statistics.median(far)


def test_what_is_open_and_what_is_the_administrators():
    assert "/health" in OPEN_PATHS and not OPEN_PATHS & ADMIN_PATHS and "/metrics" not in OPEN_PATHS


def test_tls(tmp_path):
    made = trustme.CA()
    issued = made.issue_cert("localhost")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    with running_server(demo_model(), SSL_KEYFILE=str(key), SSL_CERTFILE=str(certificate)) as server:
        assert server.url.startswith("https://localhost")
        trusted = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        assert httpx.get(server.url + "/health", verify=trusted).status_code == 200
