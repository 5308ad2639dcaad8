"""The port while the model loads: every request is told so, in its route's own shape, and what comes later waits for the server."""

import socket
import ssl

import httpx
import pytest
import trustme
from maga_transformer.config import Config
from maga_transformer.server.loading import telling_of_the_load


@pytest.fixture
def listener():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        yield own


def url(listener, scheme="http"):
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


def test_every_route_says_that_the_model_loads(listener):
    with telling_of_the_load(listener, Config.without_environment()), httpx.Client(base_url=url(listener)) as client:
        for method, path, member in (
            ("GET", "/health", "message"),
            ("POST", "/", "message"),
            ("POST", "/v1/chat/completions", "error"),
            ("GET", "/v1/models?x=1", "error"),
            ("POST", "/v1/messages", "error"),
            ("POST", "/api/v1/generate", "detail"),
        ):
            answer = client.request(method, path, json={"prompt": "a" * 100_000} if method == "POST" else None)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0, path
            assert "Loading model" in str(answer.json()[member])
        assert client.get("/v1/models").json()["error"]["code"] == "loading_model"
        assert client.get("/health/live").status_code == client.get("/liveness").status_code == 200


def test_odd_heads_do_not_end_it(listener):
    with telling_of_the_load(listener, Config.without_environment()):
        for head in (b"\r\n\r\n", b"GET\r\n\r\n", b"x" * (1 << 17), b"\xff \xfe \xfd\r\n\r\n"):
            with socket.create_connection(listener.getsockname(), timeout=20) as client:
                client.sendall(head)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass
        assert httpx.get(url(listener) + "/health").status_code == 503


def test_later_connections_wait_for_the_server(listener):
    with telling_of_the_load(listener, Config.without_environment()):
        assert httpx.get(url(listener)).status_code == 503
    with socket.create_connection(listener.getsockname(), timeout=20) as client:
        listener.settimeout(20)
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"hello")
            assert client.recv(5) == b"hello"


def test_connections_that_the_end_cuts_off_are_no_error(listener, caplog):
    with (
        socket.create_connection(listener.getsockname(), timeout=20) as silent,
        socket.create_connection(listener.getsockname(), timeout=20) as answered,
    ):
        with telling_of_the_load(listener, Config.without_environment()):
            answered.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert answered.recv(4096).startswith(b"HTTP/1.1 503")
        assert not silent.recv(1)
    assert not caplog.records


def test_over_tls(listener, tmp_path):
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with telling_of_the_load(listener, Config.without_environment(ssl_certfile=str(tmp_path / "cert.pem"))):
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        assert httpx.get(url(listener, "https"), verify=trust).status_code == 503
