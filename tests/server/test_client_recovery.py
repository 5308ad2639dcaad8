"""What the common clients make of trouble: their own classes of errors, tries after 429 and 503, a server that dies in a stream,
and streams that are closed early, awaited or cancelled."""

import asyncio
import concurrent.futures
import os
import signal

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without, the import asks the net
import litellm

from .conftest import demo_model, running_server
from .test_lifecycle import idle, wait_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of LiteLLM's own types
LIBRARIES = ["openai", "anthropic", "langchain", "litellm"]
EACH = pytest.mark.parametrize("library", LIBRARIES)
NAME = "demo"
QUESTION = "Say hello."
# Of httpx, or the httpx that a client has of its own, as openai's and anthropic's pass them on; of LangChain; of LiteLLM.
LOST = {"RemoteProtocolError", "ReadError", "APIConnectionError", "OpenAIConnectionError", "MidStreamFallbackError"}
GO_ON = {"ignore_eos": True, "temperature": 0}


def messages(text):
    return [{"role": "user", "content": text}]


class Clients:
    """The same question through each library. `seen`: the status of every answer that openai's and anthropic's clients got."""

    def __init__(self, url, retries=0, key="none"):
        self.seen = []
        hooks = {"response": [lambda answer: self.seen.append(answer.status_code)]}
        common = {"api_key": key, "max_retries": retries}
        self.openai = openai.OpenAI(base_url=url + "/v1", http_client=openai.DefaultHttpxClient(event_hooks=hooks), **common)
        self.anthropic = anthropic.Anthropic(base_url=url, http_client=anthropic.DefaultHttpxClient(event_hooks=hooks), **common)
        self.langchain = ChatOpenAI(base_url=url + "/v1", model=NAME, **common)
        self._litellm = {"api_base": url + "/v1", "api_key": key, "max_retries": 0}
        self._complete = litellm.completion
        if retries:  # its other way of trying again does not wait in between
            self._complete = litellm.completion_with_retries
            self._litellm |= {"num_retries": retries, "retry_strategy": "exponential_backoff_retry"}

    def ask(self, library, text=QUESTION, *, tokens=1, model=NAME, **extra):
        fields = {"max_tokens": tokens, "extra_body": extra}
        if library == "openai":
            return self.openai.chat.completions.create(model=model, messages=messages(text), **fields).choices[0].message.content
        if library == "anthropic":
            return self.anthropic.messages.create(model=model, messages=messages(text), **fields).content[0].text
        if library == "langchain":
            return self.langchain.invoke(text, model=model, **fields).content
        return self._complete(f"hosted_vllm/{model}", messages(text), **fields, **self._litellm).choices[0].message.content

    def stream(self, library, tokens):
        """What comes, and a way to close it."""
        fields = {"max_tokens": tokens, "extra_body": GO_ON}
        if library == "langchain":
            stream = self.langchain.stream(QUESTION, **fields)
            return stream, stream.close
        if library == "litellm":
            stream = litellm.completion(f"hosted_vllm/{NAME}", messages(QUESTION), stream=True, **fields, **self._litellm)
            return stream, stream.completion_stream.close
        create = self.openai.chat.completions.create if library == "openai" else self.anthropic.messages.create
        stream = create(model=NAME, messages=messages(QUESTION), stream=True, **fields)
        return iter(stream), stream.close


@pytest.fixture(scope="module")
def guarded():
    with running_server(demo_model(), MAGA_API_KEY="right", SERVED_MODEL_NAME=NAME) as server:
        yield server


@pytest.fixture(scope="module")
def slow():
    """One request runs, one waits, further ones are refused; each step takes half a second more."""
    settings = {"MAX_NUM_SEQS": "1", "MAX_QUEUE": "1", "MAGA_FAULT": "slow:forward:100000", "SERVED_MODEL_NAME": NAME}
    with running_server(demo_model(), **settings) as server:
        yield server


@EACH
def test_errors_have_their_class_status_and_words(guarded, library):
    classes = {"anthropic": anthropic, "litellm": litellm}.get(library, openai)
    with pytest.raises(classes.AuthenticationError) as error:
        Clients(guarded.url, key="wrong").ask(library)
    assert error.value.status_code == 401 and "key" in str(error.value)
    clients = Clients(guarded.url, key="right")
    with pytest.raises(classes.NotFoundError) as error:
        clients.ask(library, model="gpt-4")
    assert error.value.status_code == 404 and "`gpt-4` does not exist" in str(error.value) and NAME in str(error.value)
    with pytest.raises(classes.BadRequestError) as error:
        clients.ask(library, top_p=3)
    assert error.value.status_code == 400 and "top_p=3" in str(error.value)
    with pytest.raises(litellm.ContextWindowExceededError if library == "litellm" else classes.BadRequestError) as error:
        clients.ask(library, "word " * 3000)
    assert "maximum context length is 256 tokens" in str(error.value)
    assert clients.ask(library)


def test_all_try_again_after_a_full_queue(slow):
    """Each meets 429, waits as Retry-After says, and gets its answer."""
    clients = {library: Clients(slow.url, retries=30) for library in LIBRARIES}
    plain = Clients(slow.url)
    assert wait_for(lambda: idle(slow))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        before = [pool.submit(plain.ask, "openai", tokens=6, **GO_ON)]
        assert wait_for(lambda: slow.gauges()["maga_num_requests_running"] == 1)
        before.append(pool.submit(plain.ask, "openai", tokens=6, **GO_ON))
        assert wait_for(lambda: slow.gauges()["maga_num_requests_waiting"] == 1)
        answers = [pool.submit(each.ask, library) for library, each in clients.items()]
        assert wait_for(lambda: clients["openai"].seen and clients["anthropic"].seen)
        for library, error in (
            ("openai", openai.RateLimitError),
            ("anthropic", anthropic.RateLimitError),
            ("langchain", openai.RateLimitError),
            ("litellm", litellm.RateLimitError),
        ):
            with pytest.raises(error) as refused:  # without further tries
                plain.ask(library)
            assert refused.value.status_code == 429
        assert all(answer.result() for answer in [*before, *answers])
    for library in ("openai", "anthropic"):
        assert clients[library].seen[0] == 429 and clients[library].seen[-1] == 200


def test_all_outlive_a_restart():
    """503 while it drains, nobody there for a while, then another server on the port."""
    settings = {"SERVED_MODEL_NAME": NAME}
    clients = None
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with running_server(demo_model(), MAGA_FAULT="slow:forward:6", **settings) as old:
            port = old.url.rpartition(":")[2]
            clients = {library: Clients(old.url, retries=40) for library in LIBRARIES}
            last = pool.submit(Clients(old.url).ask, "openai", tokens=6, **GO_ON)
            assert wait_for(lambda: old.gauges()["maga_num_requests_running"] == 1)
            old.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: old.get("/health").status_code == 503)
            for library, error in (("openai", openai.InternalServerError), ("anthropic", anthropic.InternalServerError)):
                with pytest.raises(error, match="shutting down"):
                    Clients(old.url).ask(library)
            answers = [pool.submit(each.ask, library) for library, each in clients.items()]
            assert wait_for(lambda: all(503 in clients[library].seen for library in ("openai", "anthropic")))
            assert last.result()
            assert old.process.wait(60) == 0
        with running_server(demo_model(), START_PORT=port, **settings):
            assert all(answer.result() for answer in answers)


def test_a_server_that_dies_in_a_stream_is_told_from_an_end():
    with running_server(demo_model(), MAGA_FAULT="slow:forward:100000", SERVED_MODEL_NAME=NAME) as server:
        streams = {library: Clients(server.url).stream(library, 200)[0] for library in LIBRARIES}
        for stream in streams.values():
            next(stream)
        server.process.kill()
        for library, stream in streams.items():
            with pytest.raises(Exception) as error:
                list(stream)
            assert type(error.value).__name__ in LOST, (library, repr(error.value))


@EACH
def test_a_stream_that_is_closed_frees_its_place(slow, library):
    assert wait_for(lambda: idle(slow))
    stream, close = Clients(slow.url).stream(library, 200)
    for _ in range(2):
        next(stream)
    assert slow.gauges()["maga_num_requests_running"] == 1
    close()
    assert wait_for(lambda: idle(slow)), "it still runs"


def test_async_clients_stream_and_cancel(guarded, slow):
    async def pieces(url, key, tokens):
        """What each library's asynchronous stream brings, as (library, text)."""
        fields = {"max_tokens": tokens, "extra_body": GO_ON}
        asked = messages(QUESTION)
        gpt = openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
        async for chunk in await gpt.chat.completions.create(model=NAME, messages=asked, stream=True, **fields):
            yield "openai", chunk.choices[0].delta.content or ""
        claude = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
        async with claude.messages.stream(model=NAME, messages=asked, **fields) as stream:
            async for text in stream.text_stream:
                yield "anthropic", text
        chain = ChatOpenAI(base_url=url + "/v1", api_key=key, model=NAME, max_retries=0, stream_usage=False)
        async for chunk in chain.astream(QUESTION, **fields):
            yield "langchain", chunk.content
        lite = {"api_base": url + "/v1", "api_key": key, "max_retries": 0}
        async for chunk in await litellm.acompletion(f"hosted_vllm/{NAME}", asked, stream=True, **lite, **fields):
            yield "litellm", chunk.choices[0].delta.content or ""

    async def run():
        texts = dict.fromkeys(LIBRARIES, "")
        async for library, text in pieces(guarded.url, "right", 8):
            texts[library] += text
        assert len(set(texts.values())) == 1 and texts["openai"], texts

        began = asyncio.Event()

        async def first():
            async for _ in pieces(slow.url, "none", 200):
                began.set()

        task = asyncio.ensure_future(first())
        await asyncio.wait_for(began.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert wait_for(lambda: idle(slow))
    asyncio.run(run())
    assert wait_for(lambda: idle(slow)), "the cancelled request still runs"
