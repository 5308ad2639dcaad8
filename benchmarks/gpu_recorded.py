"""vLLM's figures on the card that benchmarks/gpu.py is for, as measured once; they are shown, not run again."""

from dataclasses import dataclass, field

NAME = "vLLM 0.22.1"
SOURCE = (
    f"{NAME} as recorded on one H200 (torch 2.11+cu130, bf16, dummy weights, greedy, prefix cache off, offline LLM.generate; "
    "decode: 128 tokens in, 256 steps, first token's time taken off)"
)


@dataclass(frozen=True)
class Figures:
    """Tokens a second: of output for decode and requests, of prompt for prefill."""

    decode: dict[int, float] = field(default_factory=dict)  # batch
    prefill: dict[tuple[int, int], float] = field(default_factory=dict)  # prompts, tokens of each
    requests: dict[tuple[int, int, int], float] = field(default_factory=dict)  # requests, tokens in, tokens out
    start_seconds: float = 0


VLLM = {
    "llama-3-8b": Figures(
        decode={1: 152.4, 8: 1633.6, 64: 10954, 256: 23244},
        prefill={(1, 1024): 39303, (1, 8192): 38506, (8, 2048): 42813},
        requests={(1000, 512, 256): 10328},
        start_seconds=49,
    ),
    "llama-3.2-1b": Figures(
        decode={1: 651, 16: 8722, 64: 23623},
        prefill={(1, 1024): 106320, (1, 8192): 209198, (8, 2048): 256423},
        start_seconds=67,
    ),
}
