"""The output of a response in OpenAI's Responses API: items made of an answer's pieces, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from maga_transformer.chat.pieces import CallArguments, CallBegin, Piece, Text


class Items:
    """At most one item is open: the last."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False

    def take(self, piece: Piece, scores: Sequence[Any]) -> list[dict[str, Any]]:
        """`scores`: log probabilities of the tokens of a text."""
        if isinstance(piece, CallBegin):
            call = {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""}
            return [*self.end(), *self._begin("fc", call)]
        if isinstance(piece, CallArguments):
            self.items[-1]["arguments"] += piece.text
            return [self._event("response.function_call_arguments.delta", delta=piece.text)]
        kind, name = ("message", "output_text") if isinstance(piece, Text) else ("reasoning", "reasoning_text")
        events = []
        if not self._open or self.items[-1]["type"] != kind:
            events = [*self.end(), *(self.begin_message() if kind == "message" else self._begin_reasoning())]
        part = self.items[-1]["content"][0]
        part["text"] += piece.text
        more = {}
        if isinstance(piece, Text):
            part["logprobs"] += scores
            more = {"logprobs": list(scores)}
        return [*events, self._event(f"response.{name}.delta", content_index=0, delta=piece.text, **more)]

    def begin_message(self) -> list[dict[str, Any]]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._begin("msg", {"type": "message", "role": "assistant", "content": []}, part)

    def _begin_reasoning(self) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        return self._begin("rs", item, {"type": "reasoning_text", "text": ""})

    def end(self, status: str = "completed") -> list[dict[str, Any]]:
        """Of the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("response.output_item.done", item)]

    def _begin(self, prefix: str, item: dict[str, Any], part: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        self.items.append({"id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **item})
        self._open = True
        events = [self._item_event("response.output_item.added", {**self.items[-1]})]
        if part is not None:
            self.items[-1]["content"] = [part]
            events.append(self._event("response.content_part.added", content_index=0, part={**part}))
        return events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}
