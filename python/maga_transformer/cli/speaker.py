"""Who answers on the terminal: a model in this process, or a server behind a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from maga_transformer.config import Config, ConfigError
from maga_transformer.request import Fault, RequestError

DEFAULT_URL = "http://localhost:8088"
Message = dict[str, str]


@dataclass(frozen=True)
class Drawing:
    """How to draw; None: as the model's or the server's defaults say."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()

    def openai(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None and value != ()}

    def raw(self) -> dict[str, Any]:
        names = {"max_tokens": "max_new_tokens", "seed": "random_seed", "stop": "stop_words_str"}
        return {names.get(name, name): list(value) if name == "stop" else value for name, value in self.openai().items()}


class Answer(Protocol):
    """Pieces of text. Closing it, or dropping it, ends the work behind it."""

    def __iter__(self) -> Iterator[str]: ...
    def close(self) -> None: ...
    @property
    def tokens(self) -> int:
        """Of the output, once it has ended; 0: unknown."""


class Speaker(Protocol):
    name: str

    def chat(self, messages: Sequence[Message], drawing: Drawing) -> Answer: ...
    def complete(self, prompt: str, drawing: Drawing) -> Answer: ...


@contextmanager
def open_speaker(where: str | None, key: str, model: str, config: Config) -> Iterator[Speaker]:
    """`where`: a URL, or the path of a model; None: the configured model, or where there is none a server on this machine."""
    if where is None and not config.checkpoint_path:
        where = DEFAULT_URL
    if where and where.startswith(("http://", "https://")):
        with RemoteSpeaker(where, key, model) as remote:
            yield remote
        return
    from maga_transformer.llm import LLM

    chosen = {name: getattr(config, name) for name in config.sources if name != "checkpoint_path"}
    with LLM(config.checkpoint_path, **chosen) as llm:
        yield LocalSpeaker(llm)


class LocalSpeaker:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.name = llm.name

    def chat(self, messages: Sequence[Message], drawing: Drawing) -> Answer:
        return LocalAnswer(self.llm.stream_chat(messages, **drawing.raw()))

    def complete(self, prompt: str, drawing: Drawing) -> Answer:
        return LocalAnswer(self.llm.stream(prompt, **drawing.raw()))


class LocalAnswer:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def close(self) -> None:
        self._stream.close()

    @property
    def tokens(self) -> int:
        return self._stream.usage.output_tokens if self._stream.usage else 0


class RemoteSpeaker:
    """Of any server with OpenAI's routes. A context manager."""

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(600, connect=10), limits=limits)
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self.name = model

    def __enter__(self) -> RemoteSpeaker:
        try:
            self.name = self.name or json.loads(self.get("/v1/models"))["data"][0]["id"]
        except BaseException:
            self._http.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def chat(self, messages: Sequence[Message], drawing: Drawing) -> Answer:
        return RemoteAnswer(self.stream("/v1/chat/completions", {"messages": list(messages)}, drawing))

    def complete(self, prompt: str, drawing: Drawing) -> Answer:
        return RemoteAnswer(self.stream("/v1/completions", {"prompt": prompt}, drawing))

    def get(self, path: str) -> Any:
        """The answer's text. ConfigError where there is no server, RequestError where it refuses."""
        try:
            answer = self._http.get(path)
        except self._errors as error:
            raise ConfigError(f"{self.url}: no server answers there ({error})") from None
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content)
        return answer.text

    def stream(self, path: str, body: Mapping[str, Any], drawing: Drawing) -> Iterator[dict[str, Any]]:
        """The chunks of an answer."""
        asked = {**body, "model": self.name, "stream": True, "stream_options": {"include_usage": True}, **drawing.openai()}
        try:
            with self._http.stream("POST", path, json=asked) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.read())
                for line in answer.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise RequestError(Fault.execution, str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
        except self._errors as error:
            raise ConfigError(f"{self.url}{path}: {error or type(error).__name__}") from None


class RemoteAnswer:
    tokens = 0

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            if chunk.get("usage"):
                self.tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                if text:
                    yield text

    def close(self) -> None:
        self._chunks.close()


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200]
    return RequestError(Fault.execution, f"the server answered {status}: {message}")
