"""The configuration: where values come from, and what is refused by name."""

import pytest
from maga_transformer.config import DEVICE_DEFAULTS, Config, ConfigError, ineffective_settings
from maga_transformer.unsupported import INEFFECTIVE, REFUSED


def test_flags_win_over_environment_over_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("max-model-len: 100\nport: 1\nblock_size: 8\nTHREADS: 3\n".replace("THREADS", "threads"))
    config = Config.load({"port": "3"}, environ={"START_PORT": "2", "MAX_SEQ_LEN": "200"}, file=str(file))
    assert (config.port, config.max_seq_len, config.seq_size_per_block, config.threads) == (3, 200, 8, 3)
    assert config.sources["port"] == "flag port"
    assert config.sources["max_seq_len"] == "environment MAX_SEQ_LEN"
    assert config.sources["threads"] == str(file)
    assert "max_num_seqs" not in config.sources


def test_environment_spellings_of_rtp_llm():
    config = Config.load(
        environ={
            "CHECKPOINT_PATH": "/m",
            "STOP_WORDS_STR": '["a","b"]',
            "STOP_WORDS_LIST": "[[1,2]]",
            "FT_SERVER_TEST": "1",
            "USE_BLOCK_CACHE": "0",
            "FORCE_STOP_WORDS": "1",
            "THINK_MODE": "1",
            "THINK_START_TAG": "<t>",
            "THINK_END_TAG": "</t>",
            "DEFAULT_CHAT_TEMPLATE_KEY": "plain",
            "DEFAULT_TOOL_USE_TEMPLATE_KEY": "tools",
            "KV_CACHE_MEM_MB": "-1",
            "PY_LOG_LEVEL": "INFO",
            "CONCURRENCY_LIMIT": "32",
        }
    )
    assert config.stop_words_str == ["a", "b"] and config.stop_words_list == [[1, 2]]
    assert config.force_stop_words and config.think_mode and (config.think_start_tag, config.think_end_tag) == ("<t>", "</t>")
    assert (config.default_chat_template_key, config.default_tool_use_template_key) == ("plain", "tools")
    assert Config.load(environ={"PORT": "81"}).port == 81
    assert config.ft_server_test and not config.reuse_cache and config.log_level == "INFO" and config.concurrency_limit == 32


def test_an_empty_variable_is_unset():
    assert Config.load(environ={"START_PORT": "", "TP_SIZE": ""}).port == 8088


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"MAX_SEQ_LEN": "abc"}, ["MAX_SEQ_LEN=abc", "integer"]),
        ({"MAX_SEQ_LEN": "-1"}, ["MAX_SEQ_LEN=-1", "greater than or equal to 0"]),
        ({"START_PORT": "70000"}, ["START_PORT=70000", "65535"]),
        ({"ACT_TYPE": "int3"}, ["ACT_TYPE=int3", "'fp32'"]),
        ({"DEVICE": "gpu"}, ["DEVICE=gpu", "cuda:N"]),
        ({"GPU_MEMORY_UTILIZATION": "1.5"}, ["GPU_MEMORY_UTILIZATION=1.5", "less than or equal to 1"]),
        ({"LOAD_FORMAT": "pt"}, ["LOAD_FORMAT=pt", "'auto' or 'dummy'"]),
        ({"STOP_WORDS_STR": "[a"}, ["STOP_WORDS_STR=[a", "JSON"]),
        ({"STOP_WORDS_LIST": '[["x"]]'}, ["STOP_WORDS_LIST[0][0]=x", "integer"]),
        ({"MAX_NUM_SEQS": "100", "MAX_NUM_BATCHED_TOKENS": "50"}, ["max_num_batched_tokens=50", "max_num_seqs=100"]),
        ({"LOG_LEVEL": "INFO", "PY_LOG_LEVEL": "DEBUG"}, ["LOG_LEVEL=INFO", "PY_LOG_LEVEL=DEBUG"]),
        ({"MAGA_FALT": "x"}, ["MAGA_FALT", "MAGA_FAULT"]),
        ({"TP_SIZE": "2"}, ["TP_SIZE=2", "valid: 1"]),
        ({"START_PORT": "1", "PORT": "2"}, ["START_PORT=1", "PORT=2", "keep one"]),
        ({"THINK_START_TAG": "<t>"}, ["think_start_tag='<t>'", "needs both marks"]),
        ({"LORA_INFO": '{"a": "/x"}'}, ["LORA_INFO", "not supported yet"]),
        ({"INT8_KV_CACHE": "1", "FP8_KV_CACHE": "1"}, ["INT8_KV_CACHE=int8 and FP8_KV_CACHE=1", "keep one"]),
        ({"INT8_KV_CACHE": "8"}, ["INT8_KV_CACHE=8: a switch"]),
        ({"BLOCKWISE_USE_FP8_KV_CACHE": "1"}, ["BLOCKWISE_USE_FP8_KV_CACHE=1", "FP8_KV_CACHE=1"]),
        ({"KV_CACHE_DTYPE": "int4"}, ["KV_CACHE_DTYPE=int4"]),
        ({"WEIGHT_TYPE": "int3"}, ["WEIGHT_TYPE=int3"]),
    ],
)
def test_mistakes_are_named(environ, words):
    with pytest.raises(ConfigError) as error:
        Config.load(environ=environ)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_unsupported_variable_is_refused_by_name_and_takes_its_neutral_values(name):
    neutral, reason = REFUSED[name]
    assert reason
    for value in neutral:
        Config.load(environ={name: value.upper()})
    with pytest.raises(ConfigError, match=name):
        Config.load(environ={name: "something"})


def test_variables_without_effect_are_listed():
    Config.load(environ=dict.fromkeys(INEFFECTIVE, "1"))
    assert ineffective_settings({"RESERVER_RUNTIME_MEM_MB": "1024", "HOME": "/"}) == ["RESERVER_RUNTIME_MEM_MB"]


def test_thoughts_between_marks_of_the_operators_own():
    """As RTP-LLM's THINK_MODE, THINK_START_TAG and THINK_END_TAG say; the latter come with line ends, spelt out or not."""
    thought = Config.load(environ={"THINK_MODE": "1"}).dialect(["a template"]).reasoning
    assert thought is not None and (thought.open, thought.close) == ("<think>", "</think>")
    assert Config.load(environ={}).dialect(["a template"]).reasoning is None
    for end in ("</t>\n\n", "</t>\\n\\n"):
        dialect = Config.load(environ={"THINK_START_TAG": "<t>", "THINK_END_TAG": end}).dialect(["{{ '[THINK][/THINK]' }}"])
        assert dialect.reasoning is not None and (dialect.reasoning.open, dialect.reasoning.close) == ("<t>", "</t>")


def test_no_name_is_both_supported_and_refused():
    from maga_transformer.config import environment_names

    supported = {env for name, field in Config.model_fields.items() for env in environment_names(name, field)}
    assert not supported & REFUSED.keys() and not supported & set(INEFFECTIVE) and not REFUSED.keys() & set(INEFFECTIVE)


def test_unknown_settings_are_refused_with_a_guess(tmp_path):
    with pytest.raises(ConfigError, match="did you mean max_seq_len"):
        Config.without_environment(max_seq_length=3)
    file = tmp_path / "s.yaml"
    file.write_text("prot: 3")
    with pytest.raises(ConfigError, match=r"prot: unknown setting in .*s\.yaml; did you mean port"):
        Config.load(environ={}, file=str(file))
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="mapping"):
        Config.load(environ={}, file=str(file))
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"s\.yaml"):
        Config.load(environ={}, file=str(file))


def test_a_library_caller_is_not_touched_by_the_environment(monkeypatch):
    monkeypatch.setenv("MAX_SEQ_LEN", "77")
    monkeypatch.setenv("TP_SIZE", "2")
    assert Config.without_environment(threads=2).max_seq_len == 0


def test_dtypes_by_the_names_of_vllm():
    config = Config.load({"dtype": "bfloat16", "kv-cache-dtype": "half"}, environ={})
    assert (config.act_type, config.kv_cache_dtype) == ("bf16", "fp16")
    assert Config.load({"kv-cache-dtype": "fp8"}, environ={}).kv_cache_dtype == "fp8_e4m3"


def test_kv_cache_precision_by_the_switches_of_rtp_llm():
    for environ, dtype in (
        ({"INT8_KV_CACHE": "1"}, "int8"),
        ({"INT8_KV_CACHE": "0", "FP8_KV_CACHE": "0"}, "auto"),
        ({"FP8_KV_CACHE": "1"}, "fp8_e4m3"),
        ({"FP8_KV_CACHE": "true", "KV_CACHE_DTYPE": "fp8_e4m3"}, "fp8_e4m3"),
        ({"KV_CACHE_DTYPE": "fp8_e5m2"}, "fp8_e5m2"),
        ({"KV_CACHE_DTYPE": "adaptive"}, "adaptive"),
    ):
        assert Config.load(environ=environ).kv_cache_dtype == dtype


def test_quantization_by_the_names_of_rtp_llm():
    for environ, method in (
        ({"INT8_MODE": "1"}, "int8"),
        ({"INT8_MODE": "0"}, ""),
        ({"WEIGHT_TYPE": "INT8"}, "int8"),
        ({"WEIGHT_TYPE": "fp16"}, ""),
        ({"QUANTIZATION": "int4"}, "int4"),
        ({"QUANTIZATION": "fp8"}, "fp8"),
        ({"WEIGHT_TYPE": "FP8"}, "fp8"),
    ):
        assert Config.load(environ=environ).quantization == method


def test_tasks_by_the_names_of_rtp_llm():
    for environ, task in (
        ({"TASK_TYPE": "RERANKER"}, "score"),
        ({"TASK_TYPE": "DENSE_EMBEDDING"}, "embed"),
        ({"EMBEDDING_MODEL": "1"}, "embed"),
        ({"EMBEDDING_MODEL": "0"}, "auto"),
        ({"TASK_TYPE": "LANGUAGE_MODEL"}, "generate"),
        ({}, "auto"),
    ):
        assert Config.load(environ=environ).task == task
    with pytest.raises(ConfigError, match="TASK_TYPE=sparse_embedding"):
        Config.load(environ={"TASK_TYPE": "SPARSE_EMBEDDING"})


@pytest.mark.parametrize("kind", DEVICE_DEFAULTS)
def test_zeros_become_the_defaults_of_the_device(kind):
    config = Config.without_environment(max_num_seqs=3).for_device(kind)
    assert config.max_num_seqs == 3
    assert config.max_num_batched_tokens == DEVICE_DEFAULTS[kind]["max_num_batched_tokens"]
    assert config.sources == {"max_num_seqs": "flag max_num_seqs"}
    for value in DEVICE_DEFAULTS[kind].values():
        assert f"{value} on {kind}" in "".join(field.description for field in Config.model_fields.values())


def test_what_contradicts_the_defaults_of_the_device_is_named():
    config = Config.without_environment(max_num_seqs=1000)
    assert config.for_device("cuda").max_num_batched_tokens > 1000
    with pytest.raises(ConfigError, match="max_num_batched_tokens=512 is below max_num_seqs=1000"):
        config.for_device("cpu")
