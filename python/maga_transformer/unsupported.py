"""RTP-LLM's environment variables that mean something this engine cannot do yet (refused) or need not do (no effect)."""

from dataclasses import dataclass

_OFF = frozenset({"", "0", "false", "off", "no", "none"})
_ONE = frozenset({"", "1"})
_UNSET = frozenset({""})

_SINGLE = "more than one device or node is not supported yet; valid: 1, or leave it unset"
_SPECULATE = "speculative decoding is not supported yet; leave it unset"
_FILES = "is not supported yet; leave it unset"

# name -> (values that ask for nothing, why others are refused)
REFUSED: dict[str, tuple[frozenset[str], str]] = {
    "TP_SIZE": (_ONE, _SINGLE),
    "PP_SIZE": (_ONE, _SINGLE),
    "DP_SIZE": (_ONE, _SINGLE),
    "EP_SIZE": (_ONE, _SINGLE),
    "FFN_SP_SIZE": (_ONE, _SINGLE),
    "WORLD_SIZE": (_ONE, _SINGLE),
    "LOCAL_WORLD_SIZE": (_ONE, _SINGLE),
    "WORLD_RANK": (_OFF, "more than one device or node is not supported yet; valid: 0, or leave it unset"),
    "DISTRIBUTE_CONFIG_FILE": (_UNSET, f"a multi-node member list {_FILES}"),
    "GANG_CONFIG_STRING": (_UNSET, f"a multi-node member list {_FILES}"),
    "GANG_ANNOCATION_PATH": (_UNSET, f"a multi-node member list {_FILES}"),
    "USE_FLOAT32": (_OFF, "not supported; valid: ACT_TYPE=fp32 for exact arithmetic"),
    "BLOCKWISE_USE_FP8_KV_CACHE": (
        _OFF,
        "scales of blocks are not supported; valid: FP8_KV_CACHE=1, whose scales are by head and token",
    ),
    "LORA_INFO": (frozenset({"", "{}"}), "LoRA adapters are not supported yet; valid: {}, or leave it unset"),
    "MULTI_TASK_PROMPT": (_UNSET, f"a file of system prompts {_FILES}"),
    "MULTI_TASK_PROMPT_STR": (frozenset({"", "[]"}), f"a list of system prompts {_FILES}"),
    "EXTRA_DATA_PATH": (_UNSET, f"an extra artefact directory {_FILES}"),
    "MEDUSA_CONFIG_FILE": (_UNSET, _SPECULATE),
    "SP_MODEL_TYPE": (_UNSET, _SPECULATE),
    "SP_CHECKPOINT_PATH": (_UNSET, _SPECULATE),
    "SP_TYPE": (_UNSET, _SPECULATE),
    "TREE_DECODE_CONFIG": (_UNSET, _SPECULATE),
    "VIT_TRT": (_OFF, "vision towers are not supported yet; valid: 0, or leave it unset"),
    "VIT_SEPARATION": (_OFF, "vision towers are not supported yet; valid: 0, or leave it unset"),
    "MODEL_TEMPLATE_TYPE": (
        _UNSET,
        "its names are not known here; leave it unset for the checkpoint's own template, or name one with CHAT_TEMPLATE",
    ),
    "FT_PLUGIN_PATH": (_UNSET, f"a plugin file {_FILES}"),
    "CONCURRENCY_WITH_BLOCK": (_OFF, "not supported; requests wait in a bounded queue anyway (MAX_QUEUE), leave it unset"),
    "PD_SEPARATION": (_OFF, "separate prefill and decode servers are not supported yet; valid: 0, or leave it unset"),
    "USE_CACHE_STORE": (_OFF, "a cache store is not supported yet; valid: 0, or leave it unset"),
}

# Parts that this engine does not have or sizes by itself; setting them changes no result.
INEFFECTIVE = (
    "RESERVER_RUNTIME_MEM_MB",
    "PRE_ALLOCATE_OP_MEM",
    "GUARANTE_GENERATE_MEM",
    "MAX_CONTEXT_BATCH_SIZE",
    "USE_RPC_MODEL",
    "ENABLE_FMHA",
    "ENABLE_OPENSOURCE_FMHA",
    "ENABLE_TRT_FMHA",
    "ENABLE_MULTI_BLOCK_MODE",
    "TP_SPLIT_EMB_AND_LMHEAD",
    "FT_DISABLE_CUSTOM_AR",
    "LOAD_CKPT_NUM_PROCESS",
    "WARM_UP",
    "ENABLE_FAST_GEN",
    "FAST_GEN_MAX_CONTEXT_LEN",
    "ENABLE_PARTIAL_FALLBACK",
    "FRONTEND_SERVER_COUNT",
    "GANG_TIMEOUT_MIN",
    "GANG_SLEEP_TIME",
    "DIST_BARRIER_TIMEOUT",
    "GEN_NUM_PER_CIRCLE",
    "MERGE_LORA",
    "THINK_END_TOKEN_ID",
    "MAX_LORA_MODEL_SIZE",
    "PY_INFERENCE_LOG_RESPONSE",
    "LOG_FILE_BACKUP_COUNT",
    "NCCL_P2P_DISABLE",
    "CACHE_STORE_RDMA_MODE",
    "LOAD_BALANCE_POLICY_NAME",
    "EPLB_MODE",
    "REDUNDANT_EXPERT",
    "USE_DEEPEP_MOE",
    "ENABLE_LAYER_MICRO_BATCH",
    "DOWNLOAD_HEADERS",
    "IMAGE_RESIZE_SUFFIX",
    "MM_CACHE_ITEM_NUM",
    "URL_CACHE_ITEM_NUM",
    "SP_WEIGHT_TYPE",
    "SP_ACT_TYPE",
    "SP_INT8_MODE",
    "SP_QUANTIZATION",
    "SP_MIN_TOKEN_MATCH",
    "SP_MAX_TOKEN_MATCH",
)


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of vLLM's `serve`. `neutral` None: it has no effect here, whatever its value."""

    flags: tuple[str, ...]
    reason: str
    takes_value: bool = True
    neutral: frozenset[str] | None = None


_NEWEST = "files on this machine are taken as they are, a model of the hub in its main revision; for another one give its folder"
_HUB_CACHE = "models of the hub lie in its cache; HF_HOME says where that is"
FOREIGN_FLAGS = (
    ForeignFlag(("--tensor-parallel-size", "-tp"), _SINGLE, neutral=_ONE),
    ForeignFlag(("--pipeline-parallel-size", "-pp"), _SINGLE, neutral=_ONE),
    ForeignFlag(("--data-parallel-size", "-dp"), _SINGLE, neutral=_ONE),
    ForeignFlag(("--enable-expert-parallel",), _SINGLE, takes_value=False, neutral=_OFF),
    ForeignFlag(("--enable-lora",), "LoRA adapters are not supported yet", takes_value=False, neutral=_OFF),
    ForeignFlag(("--lora-modules",), "LoRA adapters are not supported yet", neutral=_UNSET),
    ForeignFlag(("--speculative-config",), "speculative decoding is not supported yet", neutral=_UNSET),
    ForeignFlag(("--cpu-offload-gb",), "weights stay where the model runs; valid: 0", neutral=_OFF),
    ForeignFlag(("--revision",), _NEWEST, neutral=_UNSET),
    ForeignFlag(("--download-dir",), _HUB_CACHE, neutral=_UNSET),
    ForeignFlag(("--seed",), "a request names its seed (seed, random_seed); others draw one"),
    ForeignFlag(("--swap-space",), "a preempted sequence is computed again, nothing is swapped"),
    ForeignFlag(("--max-seq-len-to-capture",), "every length is captured"),
    ForeignFlag(("--distributed-executor-backend",), "one process runs the model"),
    ForeignFlag(("--tokenizer-mode",), "the checkpoint's files say which tokenizer it is"),
    ForeignFlag(("--enforce-eager",), "steps are captured where they can be", takes_value=False),
    ForeignFlag(("--enable-chunked-prefill",), "long prompts always come in chunks", takes_value=False),
    ForeignFlag(("--disable-log-requests",), "requests are logged with --ft-server-test or --log-level INFO", takes_value=False),
    ForeignFlag(("--disable-log-stats",), "statistics are logged with --log-level INFO", takes_value=False),
)
