"""The page at `/`, by requests and in a headless Chromium."""

import contextlib
import json
import re
import shutil

import pytest
from maga_transformer.server import page

from .chain_model import write_chain
from .conftest import demo_model, running_server
from .test_lifecycle import ABORTED, idle, wait_for

HTML = {"Accept": "text/html,application/xhtml+xml"}


def test_a_browser_gets_the_page_and_a_program_rtp_llms_answer(server):
    assert server.get("/").json() == {"status": "home"}
    answer = server.get("/", headers=HTML)
    assert answer.headers["content-type"].startswith("text/html") and "<!doctype html>" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for name in page.FILES:
        file = server.get(f"/page/{name}")
        assert file.status_code == 200 and file.content == page.FILES[name].read_bytes()
        assert file.headers["x-content-type-options"] == "nosniff"
    for name in ("page.py", "nothing.js", "..%2fpage.py", "%2e%2e/app.py"):
        assert server.get(f"/page/{name}").status_code == 404


def test_the_files_ask_nobody_else_and_are_small():
    texts = {name: file.read_text(encoding="utf-8") for name, file in page.FILES.items()}
    assert sum(map(len, texts.values())) < 64 << 10
    for name, text in texts.items():
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, name
        outside = text.replace("http://www.w3.org/2000/svg", "").replace("https?:", "")
        assert "http://" not in outside and "https://" not in outside and "//cdn" not in outside, name


def test_the_live_view(server):
    assert wait_for(lambda: idle(server))
    before = server.get("/page/engine").json()
    server.raw("a", max_new_tokens=4, ignore_eos=True)
    after = server.get("/page/engine").json()
    assert after["model"]["chats"] and after["model"]["generates"] and after["model"]["context"] == 256
    engine = after["engine"]
    assert engine["output_tokens"] == before["engine"]["output_tokens"] + 4 and engine["state"] == "ok"
    assert engine["least_seconds"] > 0 and engine["busy_seconds"] > 0
    assert engine["pages_live"] + engine["pages_cached"] + engine["pages_free"] == engine["pages_total"]


def test_the_page_can_be_off(tmp_path):
    with running_server(write_chain(tmp_path / "off", ["a", "b"]), CHAT_PAGE="0") as server:
        assert server.get("/", headers=HTML).json() == {"status": "home"}
        assert server.get("/page/engine").status_code == server.get("/page/page.css").status_code == 404
        assert not any(line.startswith("page ") for line in server.lines)


# --- in a browser ---


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser, server, expected="", **options):
    """A tab of its own, which saw no error but the expected one, and asked nobody but the server."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(60_000)
    tab, faults = context.new_page(), []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: faults.append(request.url) if not request.url.startswith(server.url) else None)
    tab.goto(server.url)
    tab.locator("#state.ok").wait_for()
    try:
        yield tab
        assert [fault for fault in faults if not expected or expected not in fault] == []
    finally:
        context.close()


def ask(tab, words, **settings):
    for name, value in settings.items():
        tab.fill(f"#settings [name={name}]", str(value))
    tab.fill("#text", words)
    tab.keyboard.press("Enter")


def finished(tab):
    tab.wait_for_selector("#send:not([hidden])")
    return tab.locator(".turn.assistant").last


def said(tab, *chunks):
    """The next chats get these deltas."""
    events = [{"choices": [{"index": 0, "delta": delta}], "usage": {"completion_tokens": 9}} for delta in chunks]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))


def test_a_chat_of_two_turns(browser, server):
    settings = {"temperature": 0, "max_tokens": 5}
    with opened(browser, server) as tab:
        assert tab.title() == server.get("/v1/models").json()["data"][0]["id"]
        turns = []
        for words in ("What is the capital of France?", "And of Spain?"):
            ask(tab, words, **settings)
            shown = finished(tab).locator(".body").inner_text()
            turns.append({"role": "user", "content": words})
            answer = server.post("/v1/chat/completions", {"messages": turns, **settings}).json()
            expected = answer["choices"][0]["message"]["content"]
            turns.append({"role": "assistant", "content": expected})
            assert shown.split() == expected.split()
        told = finished(tab).locator(".told").inner_text()
        assert "5 tokens ·" in told and "tokens/s" in told and "cut at the limit" in told
        tab.reload()  # the conversation stays
        assert tab.locator(".turn").count() == 4
        tab.locator(".turn.user").last.get_by_role("button", name="Edit").click()
        assert tab.locator(".turn").count() == 2 and tab.input_value("#text") == "And of Spain?"
        tab.get_by_role("button", name="New chat").click()
        assert tab.locator(".turn").count() == 0 and tab.locator("#greeting").is_visible()


def test_an_answer_is_stopped(browser, server):
    before = wait_for(lambda: idle(server))
    with opened(browser, server) as tab:
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})),
        )
        ask(tab, "Tell me a very long story.", temperature=0)
        tab.locator(".turn.assistant .body", has_text=re.compile(".{10}")).wait_for()
        tab.keyboard.press("Escape")
        assert "stopped" in finished(tab).locator(".told").inner_text()
        assert tab.evaluate("document.activeElement.id") == "text"
    assert wait_for(lambda: idle(server))
    assert server.gauges()[ABORTED] == before[ABORTED] + 1


def test_what_a_model_says_is_text(browser, server):
    hostile = (
        "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>\n\n"
        "[x](javascript:document.title='owned') ![y](http://127.0.0.1:9/pixel.png) [z](https://example.org/\"onmouseover=1)\n\n"
        "```html\n<b>&amp;</b>\n```\n- **bold <i>**\n" + "> " * 300 + "deep " + "*" * 4000 + "[" * 4000
    )
    with opened(browser, server) as tab:
        title = tab.title()
        said(tab, {"reasoning_content": "<b>hm</b>"}, {"content": hostile})
        ask(tab, "<u>me</u>")
        body = finished(tab).locator(".body")
        assert body.locator("img, script, iframe, i, b, u").count() == 0
        links = body.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert links == ["http://127.0.0.1:9/pixel.png", 'https://example.org/"onmouseover=1']  # to press; nothing is loaded
        assert "<img src=x onerror" in body.inner_text() and body.locator("pre code").inner_text() == "<b>&amp;</b>"
        assert body.locator("strong").first.inner_text() == "bold <i>"
        assert "<b>hm</b>" in body.locator("details").text_content()
        assert tab.locator(".turn.user .body").inner_text() == "<u>me</u>" and tab.locator("u").count() == 0
        assert tab.title() == title


def test_errors_are_told_and_do_not_stay_in_the_conversation(browser, server):
    with opened(browser, server, expected="429") as tab:
        tab.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json={"error": {"message": "come <later>"}}))
        ask(tab, "one")
        assert finished(tab).get_attribute("class") == "turn assistant error"
        assert "come <later>" in finished(tab).inner_text()
        tab.unroute("**/v1/chat/completions")
        asked = []
        tab.on("request", lambda request: asked.append(request.post_data_json) if "/v1/" in request.url else None)
        ask(tab, "two", max_tokens=2)
        finished(tab)
        assert asked[0]["messages"] == [{"role": "user", "content": "two"}]
        assert tab.locator("#said").inner_text().startswith("Answer complete: 2 tokens")


def test_a_phone_and_the_dark(browser, server):
    phone = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    with opened(browser, server, **phone) as tab:
        assert tab.locator("#side").is_hidden()
        said(
            tab, {"content": "| a | b |\n|---|---|\n| " + "long " * 60 + "| x |\n\n```\n" + "code " * 60 + "\n```\n" + "word" * 100}
        )
        ask(tab, "hi")
        finished(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") == 390  # nothing is wider than the screen
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.locator("#toggle").tap()
        assert tab.locator("#side").is_visible() and tab.get_attribute("#toggle", "aria-expanded") == "true"
        assert tab.locator("#side").bounding_box()["height"] > 600
        tab.select_option("[name=theme]", "light")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        tab.reload()
        assert tab.evaluate("document.documentElement.dataset.theme") == "light"


def test_names_and_contrast(browser, server):
    """Everything that can be operated has a name, and text stands out from its ground as WCAG AA wants."""
    with opened(browser, server) as tab:
        said(tab, {"content": "plain [link](https://example.org) `code`\n\n> quoted"})
        ask(tab, "hi")
        finished(tab)
        nameless = tab.evaluate(
            "[...document.querySelectorAll('button, input, select, textarea')].filter("
            "e => !(e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
        )
        assert nameless == []
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            pairs = tab.evaluate(
                """() => [...document.querySelectorAll('h1, h2, h3, p, dt, dd, .told, .body a, .body code, button, label, .unit')]
                .filter(e => e.checkVisibility() && e.textContent.trim()).map(e => {
                    let ground = e;
                    while (ground.parentElement && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)')
                        ground = ground.parentElement;
                    return [e.outerHTML.slice(0, 80), getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
                })"""
            )
            assert len(pairs) > 30
            for element, color, ground in pairs:
                assert contrast(color, ground) >= 4.5, (scheme, element, color, ground)


def contrast(one, other):
    def luminance(color):
        parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_model_without_a_chat_template_continues_texts(browser, tmp_path):
    with (
        running_server(write_chain(tmp_path / "chain", ["k", "<img src=x>", "<|endoftext|>"])) as server,
        opened(browser, server) as tab,
    ):
        assert "no chat template" in tab.locator("#greeting").inner_text()
        ask(tab, "k", temperature=0, max_tokens=40)
        assert finished(tab).locator(".body").inner_text() == "<img src=x>"


def test_the_demo_is_what_the_page_names(browser, server):
    with opened(browser, server) as tab:
        assert demo_model().stem in tab.locator("#facts").inner_text()
        tab.locator("#pages-words", has_text="free").wait_for()
