"""Servers and libraries of models that embed or score, beside transformers on the same texts."""

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from maga_transformer import LLM
from maga_transformer.request import RequestError
from tiny_embedders import sentence_transformer, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from .conftest import ServerProcess, running_server

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w1 w2", "w30 w31 unknown w33"]
SETTINGS = {"ACT_TYPE": "fp32", "MAX_SEQ_LEN": "0", "MAX_NUM_BATCHED_TOKENS": "64", "MAX_NUM_SEQS": "16"}


def write_bert(folder: Path, suffix: str, *, max_positions: int = 64, **settings: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=max_positions,
        **settings,
    )
    model = getattr(transformers, "Bert" + suffix)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


def write_tokenizer(folder: Path, around: str) -> None:
    """Words; `around` a text, $A, stand the special tokens of BERT."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("[SEP]", 3)])  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) if word in WORDS else 1 for word in text.split()]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedder")
    model = write_bert(folder, "Model")
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder, model


@pytest.fixture(scope="module")
def expected(embedder: tuple[Path, Any]) -> np.ndarray:
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            vectors.append(embedder[1](torch.tensor([[2, *ids_of(text), 3]])).last_hidden_state[0].mean(0).numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module")
def server(embedder: tuple[Path, Any]) -> Iterator[ServerProcess]:
    with running_server(embedder[0], **SETTINGS) as process:
        yield process
        assert process.process.poll() is None and not any("Traceback" in line for line in process.lines)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ranker")
    return folder, write_bert(folder, "ForSequenceClassification", num_labels=1)


def close(found: object, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)


def test_the_openai_client(server: ServerProcess, expected: np.ndarray) -> None:
    """litellm #42426, vllm #6744: what the client asks for by itself is base64."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=TEXTS)  # the client asks for base64 and decodes it
    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    close([entry.embedding for entry in answer.data], expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text.split()) + 2 for text in TEXTS)
    close([client.embeddings.create(model=model, input=TEXTS[2], encoding_format="float").data[0].embedding], expected[2:3])
    cut = client.embeddings.create(model=model, input=TEXTS[0], dimensions=10, extra_body={"normalize": True}).data[0].embedding
    close(cut, expected[0, :10] / np.linalg.norm(expected[0, :10]))


def test_forms_of_input(server: ServerProcess, expected: np.ndarray) -> None:
    ids = [[2, *ids_of(text), 3] for text in TEXTS]
    for route, given, rows in (
        ("/v1/embeddings", {"input": ids}, expected),
        ("/v1/embeddings", {"input": ids[3]}, expected[3:]),
        ("/embeddings", {"input": TEXTS}, expected),
        ("/", {"prompt": TEXTS[1]}, expected[1:2]),
        ("/", {"input": TEXTS, "embedding_config": {"type": "dense", "do_normalize": False}}, expected),
    ):
        close([entry["embedding"] for entry in server.post(route, given).json()["data"]], rows)
    packed = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]["embedding"]
    close(np.frombuffer(base64.b64decode(packed), "<f4"), expected[0])
    unit = server.post("/v1/embeddings", {"input": TEXTS[0], "embedding_config": {"do_normalize": True}}).json()
    assert math.isclose(np.linalg.norm(unit["data"][0]["embedding"]), 1, rel_tol=1e-5)
    short = server.post("/v1/embeddings", {"input": " ".join(["w1"] * 100), "truncate_prompt_tokens": -1})
    assert short.json()["usage"]["prompt_tokens"] == 64


def test_similarity(server: ServerProcess, expected: np.ndarray) -> None:
    answer = server.post("/v1/embeddings/similarity", {"left": TEXTS[:2], "right": TEXTS, "return_response": True}).json()
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    close(answer["similarity"], units[:2] @ units.T)
    close([entry["embedding"] for entry in answer["left_response"]["data"]], expected[:2])


def test_reranking_by_embeddings(server: ServerProcess, expected: np.ndarray) -> None:
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    cosines = units[1:] @ units[0]
    answer = server.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()
    order = [entry["index"] for entry in answer["results"]]
    assert order == np.argsort(-cosines).tolist()
    close([entry["relevance_score"] for entry in answer["results"]], cosines[order])
    assert answer["results"][0]["document"]["text"] == TEXTS[1 + order[0]]


def test_mistakes(server: ServerProcess) -> None:
    for route, body, status, why in (
        ("/v1/embeddings", {}, 400, "input is missing"),
        ("/v1/embeddings", {"input": []}, 400, "input is empty"),
        ("/v1/embeddings", {"input": ["w1", ""]}, 400, "input[1] is empty"),
        ("/v1/embeddings", {"input": 7}, 400, "input[0]=7: must be text"),
        ("/v1/embeddings", {"input": [1, 640]}, 400, "token ids must be from 0 to 63"),
        ("/v1/embeddings", {"input": "w1 " * 90}, 400, "at most 64 tokens, but input has 92"),
        ("/v1/embeddings", {"input": "w1", "dimensions": 49}, 400, "dimensions=49: valid: 1 to 48"),
        ("/v1/embeddings", {"input": "w1", "encoding_format": "hex"}, 400, "encoding_format='hex'"),
        ("/v1/embeddings", {"input": "w1", "embedding_config": {"type": "sparse"}}, 400, "this model has dense embeddings only"),
        ("/v1/embeddings", {"input": "w1", "model": "other"}, 404, "`other` does not exist"),
        ("/v1/embeddings", {"input": "w1", "dimensions": "3"}, 400, "dimensions='3'"),
        ("/v1/rerank", {"documents": ["w1"]}, 400, "query is missing"),
        ("/v1/rerank", {"query": "w1"}, 400, "documents is missing"),
        ("/v1/score", {"text_1": ["w1", "w2"], "text_2": ["w1"]}, 400, "text_1 has 2 texts and text_2 1"),
        ("/v1/completions", {"prompt": "w1"}, 400, "this model embeds texts"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}, 400, ""),
    ):
        answer = server.post(route, body)
        assert answer.status_code == status and why in answer.json()["error"]["message"], (body, answer.text)
    assert server.post("/v1/embeddings", {"input": "w1"}).status_code == 200


def test_reranking_by_a_cross_encoder(ranker: tuple[Path, Any]) -> None:
    folder, model = ranker
    pairs = [(ids_of(TEXTS[0]), ids_of(text)) for text in TEXTS[1:]]
    logits = []
    for a, b in pairs:
        ids, types = [2, *a, 3, *b, 3], [0] * (len(a) + 2) + [1] * (len(b) + 1)
        with torch.no_grad():
            logits.append(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0].item())
    scores = 1 / (1 + np.exp(-np.array(logits)))
    order = np.argsort(-scores)
    with running_server(folder, **SETTINGS) as server:
        answer = server.post("/v1/reranker", {"query": TEXTS[0], "documents": TEXTS[1:], "top_k": 2}).json()
        assert [entry["index"] for entry in answer["results"]] == order[:2].tolist()
        close([entry["relevance_score"] for entry in answer["results"]], scores[order[:2]])
        assert [entry["document"] for entry in answer["results"]] == [TEXTS[1 + i] for i in order[:2]]
        assert answer["total_tokens"] == sum(len(a) + len(b) + 3 for a, b in pairs)
        raw = server.post(
            "/rerank", {"query": TEXTS[0], "documents": [{"text": text} for text in TEXTS[1:]], "normalize": False}
        ).json()
        close([entry["relevance_score"] for entry in raw["results"]], np.array(logits)[order])
        close([entry["score"] for entry in server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]], scores)
        long = server.post("/v1/rerank", {"query": TEXTS[0], "documents": ["w1 " * 200]}).json()
        assert long["usage"]["total_tokens"] == 64
        refused = server.post("/v1/embeddings", {"input": "w1"})
        assert refused.status_code == 400 and "this model scores texts" in refused.json()["error"]["message"]


def test_the_library(embedder: tuple[Path, Any], ranker: tuple[Path, Any], expected: np.ndarray) -> None:
    with LLM(embedder[0], act_type="fp32", kv_cache_mem_mb=16) as llm:
        close(llm.embed(TEXTS), expected)
        close(llm.embed(TEXTS[1], dimensions=7), expected[1, :7])
        assert llm.score(TEXTS[0], [TEXTS[0], TEXTS[1]])[0] == pytest.approx(1, abs=1e-5)
        with pytest.raises(RequestError, match="this model embeds texts: it cannot be asked for an answer"):
            llm.generate("w1")
    with LLM(ranker[0], act_type="fp32", kv_cache_mem_mb=16) as llm:
        assert all(0 < score < 1 for score in llm.score(TEXTS[0], TEXTS))
        with pytest.raises(RequestError, match="this model scores texts: it cannot be asked for embeddings"):
            llm.embed("w1")


# --- sparse and colbert embeddings ---

WORDS_AGAIN = [*TEXTS, "w1 w2 w1 w1 w2"]


@pytest.fixture(scope="module")
def multi_vector(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """A folder like bge-m3's, and what torch makes of WORDS_AGAIN by its rules: of each text the embedding of its first token, the
    largest weight of every word, and a vector for every token but the first."""
    folder = tmp_path_factory.mktemp("multi-vector")
    model = write_bert(folder, "Model")
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens["added_tokens"] = [{"id": i, "content": word, **special} for i, word in enumerate(WORDS[:4])]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    linears = {name: torch.nn.Linear(48, width) for name, width in (("colbert", 32), ("sparse", 1))}
    for name, linear in linears.items():
        torch.save(linear.state_dict(), folder / f"{name}_linear.pt")
    found: dict[str, list[Any]] = {"dense": [], "sparse": [], "colbert": []}
    with torch.no_grad():
        for text in WORDS_AGAIN:
            ids = [2, *ids_of(text), 3]
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            weights: dict[str, float] = {}
            for token, weight in zip(ids, linears["sparse"](hidden).relu()[:, 0].tolist(), strict=True):
                if token > 3 and weight > 0:
                    weights[str(token)] = max(weight, weights.get(str(token), 0.0))
            found["dense"].append(hidden[0].numpy())
            found["sparse"].append(weights)
            found["colbert"].append(torch.nn.functional.normalize(linears["colbert"](hidden[1:]), dim=1).numpy())
    return folder, found


@pytest.fixture(scope="module")
def multi_server(multi_vector: tuple[Path, Any]) -> Iterator[ServerProcess]:
    with running_server(multi_vector[0], **SETTINGS) as process:
        yield process


def test_sparse_and_colbert(multi_server: ServerProcess, multi_vector: tuple[Path, dict[str, list[Any]]]) -> None:
    expected = multi_vector[1]
    assert any(expected["sparse"]) and len(expected["sparse"][-1]) <= 2
    for kind, name in (("dense", "embedding"), ("sparse", "sparse_embedding"), ("colbert", "colbert_embedding")):
        answer = multi_server.post("/v1/embeddings", {"input": WORDS_AGAIN, "embedding_config": {"type": kind}}).json()
        assert [entry["object"] for entry in answer["data"]] == [name] * len(WORDS_AGAIN)
        assert multi_server.post(f"/v1/embeddings/{kind}", {"input": WORDS_AGAIN}).json() == answer
        assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(text)) + 2 for text in WORDS_AGAIN)
        for entry, want in zip(answer["data"], expected[kind], strict=True):
            if kind == "sparse":
                assert entry["embedding"] == pytest.approx(want, abs=1e-5)
            else:
                np.testing.assert_allclose(np.array(entry["embedding"]), want, rtol=0, atol=1e-5)
    loose = {"input": WORDS_AGAIN[0], "embedding_config": {"type": "colbert", "do_normalize": False}}
    vectors = multi_server.post("/v1/embeddings", loose).json()["data"][0]["embedding"]
    assert not np.allclose(np.linalg.norm(vectors, axis=1), 1)


def test_similarity_of_sparse_and_colbert(multi_server: ServerProcess, multi_vector: tuple[Path, dict[str, list[Any]]]) -> None:
    sparse, colbert = multi_vector[1]["sparse"], multi_vector[1]["colbert"]
    shared = [[sum(w * b[t] for t, w in a.items() if t in b) for b in sparse] for a in sparse]
    matched = [[(a @ b.T).max(1).mean() for b in colbert] for a in colbert]
    for kind, want in (("sparse", shared), ("colbert", matched)):
        body = {"left": WORDS_AGAIN, "right": WORDS_AGAIN, "embedding_config": {"type": kind}}
        answer = multi_server.post("/v1/embeddings/similarity", body).json()
        assert answer["type"] == kind
        np.testing.assert_allclose(answer["similarity"], want, rtol=0, atol=1e-5)


def test_what_sparse_and_colbert_cannot_be(server: ServerProcess, multi_server: ServerProcess) -> None:
    for process, body, message in (
        (server, {"embedding_config": {"type": "sparse"}}, "this model has dense embeddings only"),
        (multi_server, {"embedding_config": {"type": "loose"}}, "'dense', 'sparse' or 'colbert'"),
        (multi_server, {"embedding_config": {"type": "colbert"}, "dimensions": 8}, "dimensions is for dense embeddings"),
        (multi_server, {"embedding_config": {"type": "sparse"}, "encoding_format": "base64"}, "encoding_format is for dense"),
    ):
        response = process.post("/v1/embeddings", {"input": "w1", **body})
        assert response.status_code == 400 and message in response.text, response.text


def test_dense_alone_by_task(multi_vector: tuple[Path, dict[str, list[Any]]]) -> None:
    """TASK=embed leaves out what is only for the others."""
    for task in ("embed", "auto"):
        with LLM(multi_vector[0], act_type="fp32", kv_cache_mem_mb=16, task=task) as llm:
            np.testing.assert_allclose(llm.embed(WORDS_AGAIN), multi_vector[1]["dense"], rtol=0, atol=1e-5)
            assert llm._runtime.description.task.multi_vector == (task == "auto")


# --- inputs longer than a step ---


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "lasttoken"])
def test_inputs_beyond_a_step(pooling: str, tmp_path: Path) -> None:
    """ollama #14121: a decoder's embeddings do not depend on how its inputs are cut and batched; those of other tokens than the
    last need them in one step, which has as many tokens as the model's context unless a setting says less."""
    model = tiny("qwen2", "Model", tmp_path, max_position_embeddings=600)
    sentence_transformer(tmp_path, f"pooling_mode_{pooling}", normalize=True)
    write_tokenizer(tmp_path, "$A [SEP]")
    texts = [" ".join(f"w{(7 * i + length) % 60}" for i in range(length - 1)) for length in (10, 32, 33, 599)]
    wanted = []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([[*ids_of(text), 3]])).last_hidden_state[0].numpy()
        hidden = {"cls_token": states[0], "mean_tokens": states.mean(0), "lasttoken": states[-1]}[pooling]
        wanted.append(hidden / np.linalg.norm(hidden))
    for budget in (32, 0):
        fits = 4 if pooling == "lasttoken" or not budget else 2
        with LLM(tmp_path, act_type="fp32", kv_cache_mem_mb=16, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
            close(llm.embed(texts[:fits]), np.stack(wanted[:fits]))
            for text, vector in zip(texts[:fits], wanted, strict=False):
                close(llm.embed(text), vector)
            for text in texts[fits:]:
                with pytest.raises(RequestError, match=r"at most 32 tokens \(MAX_NUM_BATCHED_TOKENS, as it reads an input in one"):
                    llm.embed(text)


def test_many_inputs_at_once(server: ServerProcess, expected: np.ndarray) -> None:
    """As many as may wait; more are refused by a message that says how many."""
    answer = server.post("/v1/embeddings", {"input": [TEXTS[i % 4] for i in range(1000)]}).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(1000))
    close([entry["embedding"] for entry in answer["data"]], expected[[i % 4 for i in range(1000)]])
    refused = server.post("/v1/embeddings", {"input": ["w1"] * 2000})
    assert refused.status_code == 400 and "input has 2000 entries; at most 1024 (MAX_QUEUE)" in refused.text
