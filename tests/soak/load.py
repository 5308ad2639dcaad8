"""Seeded load on a server: requests of every shape that a client may send, some of which are left at a random point."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from server.chain_model import write_chain

VOCABULARY, CONTEXT = 320, 256


def write_model(folder: Path) -> Path:
    """Two layers of 64, for LOAD_FORMAT=dummy; the tokenizer is the one of tests/server/chain_model.py."""
    write_chain(folder, ["a", "b"])
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Ask:
    """One request; with `leave_after` >= 0 its client goes away after that many pieces, or seconds / 100 before any."""

    body: dict[str, Any]
    leave_after: int = -1


@dataclass
class Said:
    ask: Ask
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    ended: bool = False  # by the server, with a last event
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    retry_after: str = ""
    times: list[float] = field(default_factory=list)  # seconds from the request to each piece

    @property
    def left(self) -> bool:
        return self.ask.leave_after >= 0


def draw(random_: random.Random, count: int, *, leaving: float = 0.0) -> list[Ask]:
    """Prompts share prefixes; sampling is seeded or greedy, so that an answer can be had again."""
    prefixes = [[random_.randrange(3, VOCABULARY) for _ in range(random_.choice((16, 32, 64)))] for _ in range(40)]
    asks = []
    for _ in range(count):
        prompt = [*random_.choice(prefixes), *(random_.randrange(3, VOCABULARY) for _ in range(random_.randrange(1, 40)))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": random_.randrange(1, 60), "ignore_eos": True, "stream": True}
        body |= random_.choice(
            (
                {"temperature": 0},
                {"seed": random_.randrange(1000), "temperature": 1.0},
                {"seed": 7, "top_p": 0.9, "repetition_penalty": 1.1},
                {"temperature": 0, "n": 3},
                {"seed": 3, "n": 2, "min_p": 0.05, "logprobs": 2},
            )
        )
        asks.append(Ask(body, random_.randrange(12) if random_.random() < leaving else -1))
    return asks


class Client:
    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def say(self, ask: Ask) -> Said:
        said = Said(ask)
        try:
            if ask.leave_after >= 6:  # before there is anything to read
                await asyncio.wait_for(self._stream(said), (ask.leave_after - 5) / 100)
            else:
                await self._stream(said)
        except (TimeoutError, asyncio.TimeoutError):
            pass
        except httpx.HTTPError as error:
            said.error = said.error or type(error).__name__
        return said

    async def _stream(self, said: Said) -> None:
        started = time.monotonic()
        body = {**said.ask.body, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            said.status = answer.status_code
            said.retry_after = answer.headers.get("retry-after", "")
            if answer.status_code != 200:
                said.times.append(time.monotonic() - started)
                said.error, said.ended = (await answer.aread()).decode(), True
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    said.ended = True
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    said.error, said.ended = chunk["error"]["message"], True
                    return
                said.usage = chunk.get("usage") or said.usage
                said.times.append(time.monotonic() - started)
                for choice in chunk["choices"]:
                    said.texts[choice["index"]] = said.texts.get(choice["index"], "") + choice["text"]
                if len(said.times) > said.ask.leave_after >= 0:
                    return

    async def say_all(self, asks: Iterable[Ask], at_once: int) -> list[Said]:
        waiting, said = iter(asks), []

        async def lane() -> None:
            for ask in waiting:
                said.append(await self.say(ask))

        await asyncio.gather(*(lane() for _ in range(at_once)))
        return said
