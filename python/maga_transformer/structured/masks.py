"""The thread that follows every output with a grammar and answers the engine's loop: which tokens may come next."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLExecutor, LLMatcher

from maga_transformer.structured.compiler import Compiled, one_line

if TYPE_CHECKING:
    from maga_transformer._core import MaskQueue, TokenMask

log = logging.getLogger(__name__)

NOT_FOLLOWED = "the grammar cannot be followed further"  # begins the error of an output
_MANY = 4  # masks that are worth waking other threads for


@dataclass
class _Output:
    matcher: LLMatcher
    held_off: bytes | None  # the last bytes, while the answer has not come to Compiled.after


@dataclass
class _Request:
    compiled: Compiled
    outputs: dict[int, _Output] = field(default_factory=dict)

    def output(self, index: int) -> _Output:
        if index not in self.outputs:
            self.outputs[index] = _Output(self.compiled.prototype.deep_copy(), b"" if self.compiled.after else None)
        return self.outputs[index]


class MaskWorker:
    """`register` before the request is submitted, `forget` when its last output has ended."""

    def __init__(self, queue: MaskQueue, token_bytes: Sequence[bytes]) -> None:
        self._queue = queue
        self._token_bytes = token_bytes
        self._words = (len(token_bytes) + 31) // 32
        self._requests: dict[int, _Request] = {}
        self._keys = itertools.count(1)
        self._executor: LLExecutor | None = None
        self._thread: threading.Thread | None = None

    def register(self, compiled: Compiled) -> int:
        """Returns the number that the engine knows the grammar by."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maga-masks", daemon=True)
            self._thread.start()
            # A thread that waits in C++ must not meet the interpreter's end: it would be unwound through what cannot be.
            atexit.register(self.close)
        key = next(self._keys)
        self._requests[key] = _Request(compiled)
        return key

    def close(self) -> None:
        """No mask is answered any more."""
        self._queue.close()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def forget(self, key: int) -> None:
        self._requests.pop(key, None)

    def _run(self) -> None:
        while masks := self._queue.take():
            try:
                self._answer(masks)
            except Exception as error:
                log.error("computing masks of grammars failed", exc_info=error)
                for mask in masks:
                    self._queue.fail(mask, "internal error of the grammar")

    def _answer(self, masks: Sequence[TokenMask]) -> None:
        wanted = []
        for mask in masks:
            matcher = self._advance(mask)
            if matcher is not None:
                wanted.append((mask, matcher))
        matchers = list(dict.fromkeys(matcher for _, matcher in wanted))  # outputs that begin share one, which must not come twice
        rows = np.zeros((len(matchers), self._words), np.uint32)
        if len(matchers) < _MANY:
            for row, matcher in zip(rows, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            if self._executor is None:
                self._executor = LLExecutor(max(1, min(8, (os.cpu_count() or 1) // 2)))
            indexed = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(indexed, rows.ctypes.data, rows.shape[1] * 4, rows.shape[0])
        allowed = dict(zip(matchers, rows, strict=True))
        for mask, matcher in wanted:
            if matcher.is_error():
                self._fail(mask, matcher)
            else:
                self._queue.ready(mask, allowed[matcher])

    def _advance(self, mask: TokenMask) -> LLMatcher | None:
        """The matcher in the state that the mask is for; None: the mask has been answered."""
        request = self._requests.get(mask.grammar)
        if request is None:  # it has ended meanwhile
            self._queue.fail(mask, "the request has ended")
            return None
        if mask.last_token < 0:
            if request.compiled.after:
                self._queue.ready(mask, self._everything())
                return None
            return request.compiled.prototype.deep_copy()  # others may begin with it in this very step
        output = request.output(mask.output)
        if output.held_off is not None:
            if not self._reached(output, request.compiled.after, mask.last_token):
                self._queue.ready(mask, self._everything())
                return None
        elif not output.matcher.consume_token(mask.last_token):
            self._fail(mask, output.matcher)
            return None
        if output.matcher.is_stopped():
            if output.matcher.is_error():
                self._fail(mask, output.matcher)
            else:
                self._queue.complete(mask)
            return None
        return output.matcher

    def _reached(self, output: _Output, after: bytes, token: int) -> bool:
        text = (output.held_off or b"") + self._token_bytes[token]
        if after in text:
            output.held_off = None
            return True
        output.held_off = text[-len(after) :]
        return False

    def _everything(self) -> np.ndarray:
        return np.full(self._words, 0xFFFFFFFF, np.uint32)

    def _fail(self, mask: TokenMask, matcher: LLMatcher) -> None:
        self._queue.fail(mask, f"{NOT_FOLLOWED}: {one_line(matcher.get_error(), 200)}")
