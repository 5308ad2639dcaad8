"""Writes demo_greedy.json: 30 prompts, and the 64 ids that transformers continues each with on the demo model, greedily in fp32.

PYTHONPATH=tests python tests/models/demo_greedy.py
"""

import json
import tempfile
from pathlib import Path

import torch
from folders import demo_folder
from maga_transformer.demo import demo_model
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 64
PROMPTS = [
    "hello, what is your name",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 12 times 11?",
    "List three uses of iron.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "Name the planets of the solar system.",
    "What is the boiling point of water in °F?",
    "Tell a short story about a fox.",
    "How do I sort a list in Python?",
    "What does HTTP 404 mean?",
    "Summarise: The cat sat on the mat. It was warm.",
    "Give an antonym of 'brave'.",
    "1 2 3 4 5 6",
    "Was ist die Hauptstadt von Deutschland?",
    "Count: one, two, three,",
    "Describe a sunset in one sentence.",
    "Is a tomato a fruit?",
    "Write an email that declines a meeting.",
    "😀 What does this emoji express?",
    "How many legs has a spider?",
    '{"name": "Ada", "born":',
    "What is a prime number?",
    "Suggest a name for a coffee shop.",
    "When did the Second World War end?",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = demo_folder(demo_model(), Path(place))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for text in PROMPTS:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(chat, add_special_tokens=False, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        cases.append({"text": text, "prompt": prompt["input_ids"][0].tolist(), "answer": ids[prompt["input_ids"].shape[1] :]})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    Path(__file__).with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
