"""Pictures and their addresses, H55 to H64, on a server whose models read text: each shape is refused by its name, and nobody is
asked for anything and nothing opened. llama.cpp #23331."""

import base64
import os
import socket

import pytest

from .test_constraints import listener

RAW, CHAT, MESSAGES, RESPONSES = "/", "/v1/chat/completions", "/v1/messages", "/v1/responses"
HOSTS = ("127.0.0.1", "[::1]", "0", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "localhost.")
FAR = ("169.254.169.254", "10.0.0.1", "100.64.0.1", "[fc00::1]")
HEADS = (b"II*\0", b"8BPS", b"SIMPLE  =", b"%!PS", b"\0\0\1\0")  # TIFF, PSD, FITS, EPS, ICO
URLS = {  # PORT is the listener's
    55: [
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://127.0.0.1:PORT/x",
        "gopher://127.0.0.1:PORT/x",
        "data:text/html,x",
        "oss://b/x",
    ],
    56: [*(f"http://{host}:PORT/x.png" for host in HOSTS), *(f"http://{host}/x.png" for host in FAR)],
    59: ["http://localhost:PORT/slow"],
    60: ["data:image/png;base64," + base64.b64encode(head).decode() for head in HEADS],
    61: ["data:image/png;base64,", "data:image/jpeg;base64,/9j/4AAQ"],
    62: ["data:image/png;base64,%%%", "data:image/png,raw", "data:image/png;base64," + "A" * 1_000_000],
}


def shapes(url):
    """Of all routes: route, body, a word of the message."""

    def turn(*parts):
        return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}

    said, source = {"prompt": "a"}, {"type": "url", "url": url}
    yield RAW, {**said, "images": [url]}, "images="
    yield RAW, {**said, "urls": [url]}, "urls="
    yield RAW, {"prompt_batch": ["a"], "urls": [[url]]}, "urls="
    yield "/api/v1/generate", {**said, "images": [url]}, "images="
    for kind in ("image_url", "input_image", "image"):
        part = {"type": kind, "image_url": url if kind == "input_image" else {"url": url}}
        messages = turn({"type": "text", "text": "a"}, part)["messages"]
        place = f"content[1]: the model takes no {kind} parts"
        for path in (CHAT, RAW, "/tokenize", "/chat/render"):
            yield path, {"messages": messages}, f"messages[0].{place}"
        yield RESPONSES, {"input": messages}, f"input[0].{place}"
    for kind in ("image", "document"):
        block = {"type": kind, "source": source}
        yield MESSAGES, turn(block), f"messages[0].content[0]: the model takes no {kind} blocks"
        result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
        yield MESSAGES, turn(result), "messages[0].content[0].content[0]"
    yield RESPONSES, {"input": [{"type": "input_image", "image_url": url}]}, "input[0]="
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": url}]}
    yield RESPONSES, {"input": [output]}, "input[0].output[0]"


@pytest.mark.parametrize("line", URLS, ids="h{}".format)
def test_addresses(target, line, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with listener() as (own, came):
        port = own.rsplit(":", 1)[1].partition("/")[0]
        for address in [*URLS[line], *([str(pipe), f"file://{pipe}"] if line == 55 else [])]:
            for path, body, word in shapes(address.replace("PORT", port)):
                answer = target.ask(path, body)
                assert answer.status == 400 and word in answer.error[1], (path, str(body)[:200], answer.content)
                assert len(answer.content) < 600, "the address is told in part at most"
            tag = {"prompt": f"<img>{address[:90]}</img>", "max_new_tokens": 1}
            assert target.ask(RAW, tag).status == 200, "a tag in a text is text"
        assert not came
    with pytest.raises(OSError):  # nobody has it open
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_h62_many_and_large(target):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}}
    answer = target.ask(CHAT, {"messages": [{"role": "user", "content": [part] * 100}]})
    assert answer.status == 400 and "messages[0].content[0]" in answer.error[1]
    with socket.create_connection(target.address, timeout=60) as connection:  # 64 of 19 MB, by their length
        connection.sendall(target.head(CHAT, 64 * 19_000_000))
        assert target.note(connection.recv(4096)).startswith(b"HTTP/1.1 413 ")


def test_h64_sizes(target):
    for fields in ({"min_pixels": -1}, {"max_pixels": 2**31}, {"min_pixels": 9, "max_pixels": 1}, {"resized_shape": [0, 0]}):
        answer = target.ask(RAW, {"prompt": "a", **fields})
        assert answer.status == 400 and next(iter(fields)) in answer.error[1], answer.content
        answer = target.ask(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields})
        assert answer.headers["X-Maga-Ignored"] == ", ".join(fields)
