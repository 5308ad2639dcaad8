"""The compiled core: programs, weights, backends and the engine. Everything here is C++ (see cpp/bindings)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class MagaError(RuntimeError): ...
class BusyError(MagaError): ...

# --- programs (cpp/program) -------------------------------------------------------------------------------------

class View:
    """Columns [offset, offset + width) of a value."""

    value: int
    offset: int
    width: int
    def __init__(self, value: int, offset: int, width: int) -> None: ...

class Program:
    """A model as data. Each op method appends the op of that name (cpp/program/ops.h)."""

    family: str
    vocab: int
    max_positions: int
    logits: int
    embeds: bool
    row_per_token: bool
    @property
    def whole_prompts(self) -> bool: ...
    @property
    def logits_width(self) -> int: ...
    def __init__(self) -> None: ...
    @property
    def virtual_tokens(self) -> int: ...
    def add_virtual_tokens(self, table: int) -> None:
        """Gives every Embed the rows of the weight `table`, (tokens, width), for the ids behind the vocabulary."""

    def set_context(self, end: int = -1, held: Sequence[int] = (), whole: bool = False) -> None: ...
    @property
    def context(self) -> tuple[int, list[int], bool]: ...
    def value(self, name: str, width: int, rows: str = "tokens") -> View: ...
    def input(self, name: str, width: int) -> View: ...
    def output(self, view: View) -> None: ...
    def weight(self, name: str, sources: Sequence[str], shape: Sequence[int]) -> int: ...
    def rope_table(
        self,
        rotary_dim: int,
        inv_freq: Sequence[float],
        *,
        interleaved: bool = False,
        multiplier: float = 1.0,
        theta: float = 0.0,
        by_block: bool = False,
        dynamic_factor: float = 0.0,
        stepped: bool = False,
        long_inv_freq: Sequence[float] = (),
        max_positions: int = 0,
    ) -> int: ...
    def alibi_slopes(self, slopes: list[float]) -> int: ...
    def corrections(self, corrections: list[float]) -> int: ...
    def cache_layer(self, kv_heads: int, head_dim: int, v_dim: int, values_in_keys: bool = False) -> int: ...
    def state_scales(self, layer: int, k: float, v: float) -> None:
        """Of fp8_e4m3 keys and values; 0: each head of a token has its own."""
    def embed(self, out: View, table: int, scale: float = 1.0) -> None: ...
    def add_positions(self, out: View, in_: View, *, table: int, offset: int = 0, divisor: int = 1) -> None: ...
    def log_scale(self, x: View, *, from_: int) -> None: ...
    def bound(self, out: View, in_: View, *, kind: str, limit: float) -> None: ...
    def norm(
        self, out: View, in_: View, *, weight: int, bias: int = -1, kind: str, eps: float, group: int, weight_offset: float = 0.0
    ) -> None: ...
    def linear(self, out: View, in_: View, *, weight: int, bias: int = -1, residual: View | None = None) -> None: ...
    def head_linear(self, out: View, in_: View, *, weight: int, heads: int) -> None: ...
    def rope(self, x: View, *, head_dim: int, table: int, offset: int = 0) -> None: ...
    def attention(
        self,
        out: View,
        q: View,
        k: View | None,
        v: View | None,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        alibi: int = -1,
        sinks: int = -1,
    ) -> None: ...
    def activation(self, out: View, gate: View, up: View | None, *, kind: str) -> None: ...
    def add(self, out: View, a: View, b: View) -> None: ...
    def select(self, out: View, in_: View) -> None: ...
    def pool(self, out: View, in_: View, *, kind: str) -> None: ...
    def moe(
        self,
        out: View,
        in_: View,
        logits: View,
        *,
        residual: View | None = None,
        gate_up: int,
        down: int,
        gate_up_bias: int = -1,
        down_bias: int = -1,
        width: int,
        experts: int,
        top_k: int,
        score: str = "softmax",
        correction: int = -1,
        groups: int = 1,
        top_groups: int = 1,
        group_best: int = 1,
        renormalise: bool = False,
        scale: float = 1.0,
        kind: str,
        alpha: float = 1.0,
        limit: float = 0.0,
        up_offset: float = 0.0,
    ) -> None: ...
    def gated_linear(self, out: View, in_: View, *, weight: int, bias: int = -1, kind: str) -> None: ...
    def prepare_qkv(
        self,
        q: View,
        k: View,
        v: View,
        *,
        q_norm: int = -1,
        k_norm: int = -1,
        eps: float = 0.0,
        weight_offset: float = 0.0,
        rope_table: int = -1,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None: ...
    @property
    def inputs(self) -> list[int]: ...
    def validate(self) -> None: ...
    @property
    def weights(self) -> list[tuple[str, list[str], list[int]]]: ...
    @property
    def values(self) -> list[tuple[str, int, str]]: ...
    @property
    def ops(self) -> list[dict[str, Any]]:
        """One dict an op: "op" (its name) and every field by its C++ name; views as (value, offset, width)."""
    @property
    def cache_layers(self) -> list[tuple[int, int, int]]: ...
    def page_bytes(self, page_tokens: int, kv_dtype: str | Sequence[str]) -> int: ...

def fuse(program: Program, *, linear_residual: bool, gated_linear: bool, prepare_qkv: bool) -> Program: ...
def cuts(program: Program) -> list[tuple[int, int]]:
    """(op, value): before this op one value is needed of what was computed so far (cpp/program/part.h)."""

def part(program: Program, first: int, last: int, *, outputs: Sequence[int]) -> Program:
    """The ops [first, last) as a program of its own, with the weights and cache layers that they use."""

def cost(
    program: Program,
    *,
    sequences: int,
    tokens_per_sequence: int,
    context: int,
    logit_rows: int,
    kv_dtype: str | Sequence[str],
    weight_bytes: Sequence[float],
) -> list[tuple[float, float, float]]:
    """(flops, weight bytes, K/V bytes) of each op."""

def quantize(values: np.ndarray, dtype: str, *, bits: int, group: int, name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes (rows, columns), scales (rows, groups) and zero of an Affine weight (cpp/program/quantize.h). Releases the GIL."""

def quantize_fp8(values: np.ndarray, dtype: str, *, name: str) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes (rows, columns) and scales (rows, 1) of a Float8 weight. Releases the GIL."""

# --- weights and backends (cpp/program/weight.h, cpp/backends/backend.h) -----------------------------------------

class Weight:
    @property
    def bytes(self) -> int: ...
    @property
    def widened(self) -> str: ...  # why its codes are held as dense values; "": they are not

class WeightStack:
    """Packs matrix by matrix, so that no more than one is unpacked at a time."""

    def add_dense(self, values: np.ndarray, dtype: str) -> None:
        """The next matrix, as in Backend.pack_dense."""
    def add_affine(
        self, codes: np.ndarray, *, bits: int, group: int, scale: np.ndarray, offset: np.ndarray | None, zero: int
    ) -> None: ...
    def add_float8(self, codes: np.ndarray, *, block: tuple[int, int], scale: np.ndarray) -> None: ...
    def finish(self) -> Weight:
        """Once all matrices are there."""

class Backend:
    def describe(self) -> str: ...
    def pack_dense(self, name: str, shape: Sequence[int], values: np.ndarray, dtype: str) -> Weight:
        """`values` holds fp32, fp16, or bf16 bits as uint16; `dtype` is "fp32", "fp16" or "bf16". Releases the GIL."""
    def pack_affine(
        self,
        name: str,
        shape: Sequence[int],
        codes: np.ndarray,
        *,
        bits: int,
        group: int,
        scale: np.ndarray,
        offset: np.ndarray | None,
        zero: int,
    ) -> Weight:
        """The canonical Affine form (cpp/program/weight.h). Releases the GIL."""
    def pack_float8(
        self, name: str, shape: Sequence[int], codes: np.ndarray, *, block: tuple[int, int], scale: np.ndarray
    ) -> Weight:
        """The canonical Float8 form: e4m3 codes, a scale for each block of (rows, columns). Releases the GIL."""
    def stack(self, name: str, shape: Sequence[int]) -> WeightStack:
        """For a weight of the shape (matrices, rows, columns)."""
    def load(
        self,
        program: Program,
        weights: Sequence[Weight],
        *,
        tokens: int,
        sequences: int,
        logit_rows: int,
        pages: int,
        page_tokens: int,
        kv_dtype: str | Sequence[str],
    ) -> Executable:
        """`pages` 0: as many as the device has room for, where the backend can tell; `limits` of the result says how many.
        `kv_dtype`: of all cache layers, or of each."""
    def fused_ops(self) -> dict[str, bool]: ...

def cpu_backend(threads: int = 0, quantize_activations: bool = True, isa: str = "") -> Backend: ...
def reference_backend() -> Backend: ...
def cuda_backend(
    device: int = 0, compute: str = "bf16", memory_utilization: float = 0.9, library_folders: Sequence[str] = ()
) -> Backend:
    """`compute`: "bf16", "fp16" or "fp32". FileNotFoundError says what is missing: the library, a driver, a card, cuBLASLt."""

def cuda_devices() -> tuple[list[CudaDevice], str]:
    """The cards that cuda_backend takes; where there is none, why."""

class CudaDevice:
    name: str
    total_bytes: int
    free_bytes: int
    capability: int  # 90: sm_90
    bytes_per_second: float  # of its memory, as its data sheet has it
    flops_per_second: float  # of 16-bit products on tensor cores, likewise

class Limits:
    tokens: int
    sequences: int
    logit_rows: int
    pages: int
    page_tokens: int

class Draw:
    """How a device chooses the token of one row of logits (cpp/backends/draw.h)."""
    def __init__(
        self,
        *,
        row: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stream: int = 0,
        index: int = 0,
    ) -> None: ...

class Executable:
    """One thread at a time; Engine takes it over."""
    def enqueue(
        self,
        draws: Sequence[Draw],
        *,
        ids: Sequence[int],
        positions: Sequence[int],
        sequence_start: Sequence[int],
        kv_length: Sequence[int],
        page_start: Sequence[int],
        pages: Sequence[int],
        logit_rows: Sequence[int],
        prompt_length: Sequence[int] | None = None,
        tree: Sequence[int] = (),
        context: Sequence[int] = (),
        block_positions: Sequence[int] = (),
    ) -> None:
        """Queues a step on an asynchronous device; an id of -1 - i is what draw i of the step enqueued before chooses."""
    def collect(self) -> list[tuple[int, bool]]:
        """Waits for the oldest step not collected: of each draw the token, and whether its row was finite."""
    @property
    def asynchronous(self) -> bool: ...
    @property
    def limits(self) -> Limits: ...
    def run(
        self,
        *,
        ids: Sequence[int],
        positions: Sequence[int],
        sequence_start: Sequence[int],
        kv_length: Sequence[int],
        page_start: Sequence[int],
        pages: Sequence[int],
        logit_rows: Sequence[int],
        prompt_length: Sequence[int] | None = None,
        tree: Sequence[int] = (),
        context: Sequence[int] = (),
        block_positions: Sequence[int] = (),
    ) -> None: ...
    def logits(self) -> np.ndarray: ...
    def fill_pages(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """(tokens, kv_heads, head_dim) and (tokens, kv_heads, v_dim): K/V entries from index 0 on, in the pages from 0 on."""

    def copy_page(self, source: int, target: int) -> None: ...
    def write_value(self, value: int, rows: np.ndarray) -> None: ...
    def read_value(self, value: int, rows: int) -> np.ndarray: ...
    @property
    def program(self) -> Program: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def op_seconds(self) -> list[float]:
        """Seconds spent in each of program.ops since the load; empty where the backend does not measure them."""

# --- the engine (cpp/engine) ------------------------------------------------------------------------------------

class SamplingParams:
    """Fields, ranges and meaning: cpp/engine/request.h."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: list[tuple[int, float]]
    bad_words: list[list[int]]
    stop_words: list[list[int]]
    stop_strings: list[bytes]
    stop_token_ids: list[int]
    logprobs: int
    prompt_logprobs: int
    return_logits: bool
    select_tokens: list[int]
    return_hidden_states: bool
    top_p_decay: float
    top_p_min: float
    top_p_reset_ids: list[int]
    top_a: float
    tfs: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    nsigma: float
    dynatemp_min: float
    dynatemp_max: float
    dynatemp_exponent: float
    temperature_last: bool
    smoothing_factor: float
    smoothing_curve: float
    skew: float
    xtc_probability: float
    xtc_threshold: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    no_repeat_ngram_size: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_range: int
    dry_breakers: list[int]
    token_bans: list[int]
    token_ban_ranges: list[tuple[list[int], int, int]]
    allowed_tokens: list[int]
    sampler_priority: list[int]
    beam_width: int
    length_penalty: float
    beam_stop: str
    def __init__(self, **fields: Any) -> None: ...
    def validate(self, vocab: int) -> None: ...

class Event:
    request: int
    sequence: int
    tokens: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]]]  # value, rank, most likely tokens
    logits: np.ndarray
    hidden_states: np.ndarray
    finish: str  # "", "stop", "length", "cancelled", "timeout", "error"
    stop_token: int
    stop_word: int
    stop_string: int
    error: str
    embedding: np.ndarray  # (width) fp32, of a program that embeds
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    cumulative_logprob: float
    wait_seconds: float
    first_token_seconds: float
    total_seconds: float

class TokenMask:
    """One that the engine's loop waits for: cpp/engine/token_mask.h."""

    @property
    def grammar(self) -> int: ...
    @property
    def output(self) -> int: ...
    @property
    def last_token(self) -> int: ...

class MaskQueue:
    def take(self) -> list[TokenMask]: ...
    def close(self) -> None: ...
    def ready(self, mask: TokenMask, allowed: NDArray[np.uint32]) -> None: ...
    def complete(self, mask: TokenMask) -> None: ...
    def fail(self, mask: TokenMask, error: str) -> None: ...

class Engine:
    def __init__(
        self,
        backend: Backend,
        model: Executable,
        *,
        max_sequences: int,
        token_budget: int,
        max_queue: int,
        max_sequence_length: int = 0,
        prefix_cache: bool = True,
        prefix: Sequence[int] = (),
        prefix_in_pages: bool = False,
        prefix_has_positions: bool = True,
        bytes_per_second: float = 0.0,
        flops_per_second: float = 0.0,
        weight_bytes: Sequence[float] = (),
        fault: str = "",
    ) -> None: ...
    def set_vocabulary(self, token_bytes: Sequence[bytes]) -> None: ...
    def submit(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        sequences: int = 1,
        priority: int = 0,
        timeout_seconds: float = 0.0,
        cache_salt: str = "",
        grammar: int = 0,
        segment_start: int = ...,
        segment_shift: int = 0,
    ) -> int: ...
    def cancel(self, request: int, sequence: int = -1) -> None: ...
    def poll(self) -> list[Event]: ...
    def event_fd(self) -> int: ...
    def masks(self) -> MaskQueue: ...
    def drain(self, timeout_seconds: float) -> bool: ...
    def stats(self) -> dict[str, Any]:
        """EngineStats of cpp/engine/engine.h, field by field."""

# --- tests (cpp/bindings/bind_testing.cpp) ----------------------------------------------------------------------

testing: Any
"""The parts of the engine one by one, and a model whose output a test can predict. Nothing outside tests/ uses it."""
