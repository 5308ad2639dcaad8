"""ChatGLM-6B's tokenizer: the SentencePiece model ice_text.model behind the ids of images, with tokens for newlines, tabs and
runs of blanks (https://arxiv.org/abs/2210.02414, section 2.2)."""

from dataclasses import replace

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors

from maga_transformer.tokenizer.sentencepiece import NORMAL, read_sentencepiece, sentencepiece_tokenizer

SPECIAL = {"bos": "<sop>", "eos": "<eop>", "pad": "<pad>", "unk": "<unk>", "mask": "[MASK]"}
_GENERATION_MASK = "[gMASK]"
_MOST_BLANKS = 80  # of a run that is one token
_SPELLED = {"\n": "<n>", "\t": "<|tab|>", **{" " * count: f"<|blank_{count}|>" for count in range(_MOST_BLANKS, 1, -1)}}

# Without earlier turns the question alone; the mask and the start of the answer come last.
CHAT = (
    "{% if messages | length == 1 %}{{ messages[0].content }}{% else %}{% set turn = namespace(number=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}[Round {{ turn.number }}]\n问：{{ message.content }}\n答："
    "{% set turn.number = turn.number + 1 %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}[gMASK]<sop>{% endif %}"
)


def ice_text_tokenizer(path: str, images: int) -> Tokenizer:
    """`images`: ids that stand for images, before those of the pieces."""
    model = read_sentencepiece(path)
    model = replace(
        model,
        tokens=[f"\0<image_{i}>" for i in range(images)] + model.tokens,  # a text of these letters is no image
        scores=[min(model.scores)] * images + model.scores,
        types=[NORMAL] * images + model.types,
        ids={role: token if token < 0 else token + images for role, token in model.ids.items()},
    )
    tokenizer = sentencepiece_tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(text, token) for text, token in _SPELLED.items()]
    tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    back: list[decoders.Decoder] = [decoders.Replace(token, text) for text, token in _SPELLED.items()]
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, *back])
    special = [*SPECIAL.values(), _GENERATION_MASK, "</s>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    ends = [(text, tokenizer.token_to_id(text)) for text in (_GENERATION_MASK, SPECIAL["bos"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [gMASK] <sop>", special_tokens=ends)
    return tokenizer
