"""Seeded load on a server: requests of every shape that a client may send, some of which are left at a random point."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from server.chain_model import END, WIDTH, write_random

VOCABULARY, CONTEXT = WIDTH, 256
ENDLESS = 1e9  # seconds


def write_model(folder: Path) -> Path:
    """One for LOAD_FORMAT=dummy, with a chat template."""
    write_random(folder, CONTEXT)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    return folder


@dataclass
class Ask:
    """One request. Its client goes away after `pieces` pieces of the answer or after `seconds`, if that comes before the end."""

    body: dict[str, Any]
    pieces: int = -1  # -1: never
    seconds: float = ENDLESS


@dataclass
class Said:
    ask: Ask
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    ended: bool = False  # by the server, with a last event
    left: bool = False  # by the client
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    retry_after: str = ""
    times: list[float] = field(default_factory=list)  # seconds from the request to each piece
    seconds: float = 0.0  # to the end

    @property
    def well(self) -> bool:
        return self.ended and not self.error

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def prompt_of(random_: random.Random, tokens: int) -> list[int]:
    return [random_.randrange(3, VOCABULARY) for _ in range(tokens)]


_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0, "n": 3},
    {"n": 2, "min_p": 0.05, "logprobs": 2},
)


def draw(random_: random.Random, count: int, *, leaving: float = 0.0, grammars: float = 0.0) -> list[Ask]:
    """Prompts share prefixes; sampling is seeded or greedy, so that an answer can be had again. A share of the clients leaves, and
    a share of the answers follows a grammar of its own."""
    prefixes = [prompt_of(random_, random_.choice((16, 32, 64))) for _ in range(40)]
    asks = []
    for _ in range(count):
        prompt = [*random_.choice(prefixes), *prompt_of(random_, random_.randrange(1, 40))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": random_.randrange(1, 60), "ignore_eos": True, "stream": True}
        body |= random_.choice(_SAMPLING) | {"seed": random_.randrange(1000)}
        if random_.random() < grammars:
            body |= {"guided_regex": f"(k{random_.randrange(10**9)}[0-9]|[a-f]x){{2,9}}"}
        ask = Ask(body)
        if random_.random() < leaving:
            if random_.random() < 0.5:
                ask.pieces = random_.randrange(6)
            else:
                ask.seconds = random_.uniform(0, 0.08)
        asks.append(ask)
    return asks


class Client:
    def __init__(self, url: str) -> None:
        self._http = aiohttp.ClientSession(
            url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120), trust_env=False
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def say(self, ask: Ask) -> Said:
        said, started = Said(ask), time.monotonic()
        try:
            if ask.seconds < ENDLESS:
                await asyncio.wait_for(self._stream(said, started), ask.seconds)
            else:
                await self._stream(said, started)
        except (TimeoutError, asyncio.TimeoutError):
            said.left = ask.seconds < ENDLESS
            said.error = "" if said.left else "no end within two minutes"
        except aiohttp.ClientError as error:
            said.error = f"{type(error).__name__}: {error}"
        said.seconds = time.monotonic() - started
        return said

    async def _stream(self, said: Said, started: float) -> None:
        body = orjson.dumps({**said.ask.body, "stream_options": {"include_usage": True}})
        headers = {"Content-Type": "application/json"}
        async with self._http.post("/v1/completions", data=body, headers=headers) as answer:
            said.status = answer.status
            said.retry_after = answer.headers.get("retry-after", "")
            if answer.status != 200:
                said.error, said.ended = await answer.text(), True
                return
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self._piece(said, orjson.loads(line[6:]), time.monotonic() - started)
                    said.left = len(said.times) > said.ask.pieces >= 0 and not said.ended
                elif line.startswith(b"data: [DONE]"):
                    said.ended = True
                if said.ended or said.left:
                    return

    @staticmethod
    def _piece(said: Said, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            said.error, said.ended = chunk["error"]["message"], True
            return
        said.usage = chunk.get("usage") or said.usage
        said.times.append(now)
        for choice in chunk["choices"]:
            said.texts[choice["index"]] = said.texts.get(choice["index"], "") + choice["text"]

    async def say_all(self, asks: Sequence[Ask], at_once: int) -> list[Said]:
        """Closed loop: the next one begins when one has ended."""
        waiting = iter(enumerate(asks))
        said: dict[int, Said] = {}

        async def lane() -> None:
            for index, ask in waiting:
                said[index] = await self.say(ask)

        await asyncio.gather(*(lane() for _ in range(at_once)))
        return [said[index] for index in range(len(asks))]

    async def say_at(self, asks: Sequence[Ask], each_second: float) -> list[Said]:
        """Open loop: requests come at their own pace, whatever becomes of those before."""

        async def later(index: int, ask: Ask) -> Said:
            await asyncio.sleep(index / each_second)
            return await self.say(ask)

        return list(await asyncio.gather(*(later(index, ask) for index, ask in enumerate(asks))))
