"""Other engines behind the interface that benchmarks/engine.py measures ours with. Each runs only if it is installed."""

import importlib.util
import pathlib
import time
from collections.abc import Sequence
from typing import Protocol

Prompt = Sequence[int]


class Peer(Protocol):
    name: str

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from a prompt to its first token."""

    def decode(self, prompts: Sequence[Prompt], steps: int) -> float:
        """Seconds for `steps` more tokens of every sequence, all of them in one batch; prefill not counted."""


class LlamaCpp:
    """llama.cpp through the C interface of llama-cpp-python: greedy choice on the host, flash attention left at its default."""

    name = "llama.cpp"

    def __init__(self, path: pathlib.Path, threads: int, max_sequences: int, max_tokens: int, repack: bool = True) -> None:
        """`repack`: whether it may lay weights out anew, for AMX among others, which ends some virtual machines' processes."""
        import llama_cpp

        self.c = llama_cpp
        self.c.llama_log_set(_quiet(llama_cpp), None)
        self.c.llama_backend_init()
        model_params = self.c.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = self.c.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise ValueError(f"{path}: llama.cpp cannot load it; name a GGUF file of the same model with --peer-model")
        params = self.c.llama_context_default_params()
        params.n_ctx = max_sequences * max_tokens
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = max_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = max_sequences == 1
        self.context = self.c.llama_init_from_model(self.model, params)
        self.vocab = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))
        self.batch = self.c.llama_batch_init(512, 0, 1)

    def _run(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Tokens as (id, position, sequence, wants logits)."""
        self.batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = logits
        if self.c.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _greedy(self, row: int) -> int:
        import numpy

        logits = numpy.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, row), (self.vocab,))
        return int(logits.argmax())

    def _prompt(self, prompt: Prompt, sequence: int) -> int:
        for begin in range(0, len(prompt), 512):
            part = prompt[begin : begin + 512]
            last = begin + len(part) == len(prompt)
            self._run([(t, begin + i, sequence, last and i == len(part) - 1) for i, t in enumerate(part)])
        return self._greedy(len(part) - 1)

    def _clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def prefill(self, prompt: Prompt) -> float:
        self._clear()
        start = time.perf_counter()
        self._prompt(prompt, 0)
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Prompt], steps: int) -> float:
        self._clear()
        tokens = [self._prompt(p, s) for s, p in enumerate(prompts)]
        start = time.perf_counter()
        for step in range(steps):
            self._run([(t, len(p) + step, s, True) for s, (t, p) in enumerate(zip(tokens, prompts, strict=True))])
            tokens = [self._greedy(s) for s in range(len(prompts))]
        return time.perf_counter() - start


class Transformers:
    """transformers with torch in fp32, greedy, with its own K/V cache. A GGUF file needs the package accelerate too."""

    name = "transformers fp32"

    def __init__(self, path: pathlib.Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(threads)
        folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()

    def prefill(self, prompt: Prompt) -> float:
        ids = self.torch.tensor([list(prompt)])
        start = time.perf_counter()
        with self.torch.inference_mode():
            self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Prompt], steps: int) -> float:
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([list(p) for p in prompts]), use_cache=True, logits_to_keep=1)
            ids = out.logits.argmax(-1)
            start = time.perf_counter()
            for _ in range(steps):
                out = self.model(ids, past_key_values=out.past_key_values, use_cache=True)
                ids = out.logits[:, -1:].argmax(-1)
            return time.perf_counter() - start


def installed(name: str) -> bool:
    module = {"llama.cpp": "llama_cpp", "transformers": "transformers"}[name]
    return importlib.util.find_spec(module) is not None


_callbacks = []


def _quiet(llama_cpp: object) -> object:
    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)  # type: ignore[attr-defined]
    _callbacks.append(callback)  # the library keeps only a pointer
    return callback
