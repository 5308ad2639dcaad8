"""LangChain and LiteLLM as people use them: they stream, fail and recover as they should."""

import asyncio
import json
import os

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without, the import asks the net
import litellm

litellm.telemetry = False
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of LiteLLM's own types
QUESTION = "Say hello."


class City(BaseModel):
    name: str
    people: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return city


@pytest.fixture(scope="module")
def langchain(server, model):
    return ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model=model, temperature=0, max_tokens=60, max_retries=0, stream_usage=True
    )


def test_langchain_answers_and_streams(langchain):
    whole = langchain.invoke([HumanMessage(QUESTION)])
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    chunks = list(langchain.stream([HumanMessage(QUESTION)]))
    assert "".join(chunk.content for chunk in chunks) == whole.content and len(chunks) > 2
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"]

    async def several():
        return await asyncio.gather(*[langchain.ainvoke(QUESTION) for _ in range(4)])

    assert {answer.content for answer in asyncio.run(several())} == {whole.content}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures(langchain, method):
    found = langchain.with_structured_output(City, method=method).invoke("Name a city in France and how many people live there.")
    assert isinstance(found, City)


def test_langchain_calls_tools(langchain):
    bound = langchain.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    answer = bound.invoke("Weather in Paris?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    merged = None
    for chunk in bound.stream("Weather in Paris?"):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls[0]["args"] == call["args"]


def test_langchain_fails_and_recovers(langchain, model):
    import openai

    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        langchain.invoke("word " * 3000)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=langchain.openai_api_base, api_key="none", model="gpt-4", max_retries=0).invoke(QUESTION)
    assert langchain.invoke(QUESTION).content


def complete(server, model, **fields):
    return litellm.completion(
        model=f"hosted_vllm/{model}",
        api_base=server.url + "/v1",
        api_key="none",
        temperature=0,
        num_retries=0,
        **{"max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}], **fields},
    )


def test_litellm_answers_and_streams(server, model):
    whole = complete(server, model)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0
    chunks = list(complete(server, model, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_litellm_structures(server, model):
    answer = complete(server, model, max_tokens=80, response_format=City)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "people"}


def test_litellm_fails_and_recovers(server, model):
    """Its own classes of errors: fallbacks hang on them."""
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(server, model, messages=[{"role": "user", "content": "word " * 3000}])
    with pytest.raises(litellm.NotFoundError):
        complete(server, "gpt-4")
    with pytest.raises(litellm.BadRequestError):
        complete(server, model, top_p=3)
    assert complete(server, model).choices[0].message.content


def test_litellm_speaks_anthropics_route(server, model):
    answer = litellm.completion(
        model=f"anthropic/{model}",
        api_base=server.url,
        api_key="none",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=5,
    )
    assert answer.choices[0].message.content
