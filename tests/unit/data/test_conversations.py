"""What of a conversation is learnt, against markings by hand and against transformers."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import numpy
import pytest

from megatron.packed.data.chat_formats import FORMATS, TokenizersTemplate
from megatron.packed.data.conversations import (
    ConversationEncoder,
    build_chat_format,
    read_conversations,
)
from megatron.packed.data.json_lines import JsonLine
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import ConfigurationError, DataError

EOD = 256
CONVERSATION = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "hi /think"},
    {"role": "assistant", "content": " hello "},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]
# What is learnt stands between « and »; ¶ is EOD.
MARKED = {
    "identity": " be brief hi /think« hello »bye«ciao¶»",
    "chatml": (
        "<|im_start|>system\n be brief <|im_end|>\n<|im_start|>user\nhi /think<|im_end|>\n"
        "<|im_start|>assistant\n« hello <|im_end|>»\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n«ciao<|im_end|>»\n«¶»"
    ),
    "nemotron-h-aligned": (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\nhi /think\n<SPECIAL_11>Assistant\n"
        "«hello\n»<SPECIAL_11>User\nbye\n<SPECIAL_11>Assistant\n«ciao\n¶»"
    ),
    "nemotron-nano-v2": (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\nhi\n<SPECIAL_11>Assistant\n"
        "«hello\n<SPECIAL_12>\n»<SPECIAL_11>User\nbye\n<SPECIAL_11>Assistant\n"
        "«ciao\n<SPECIAL_12>\n¶»"
    ),
}


def line(entry: object) -> JsonLine:
    raw = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return JsonLine("chats.jsonl:7", raw)


def encode(name_or_format: object, entry: object):
    chat_format = FORMATS[name_or_format]() if isinstance(name_or_format, str) else name_or_format
    return ConversationEncoder(ByteTokenizer(), chat_format).encode(line(entry))


def unmark(marked: str) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    supervised: list[int] = []
    learnt = 0
    for character in marked:
        if character in "«»":
            learnt = int(character == "«")
            continue
        ids = [EOD] if character == "¶" else list(character.encode())
        tokens += ids
        supervised += [learnt] * len(ids)
    return tokens, supervised


@pytest.mark.parametrize("name", FORMATS)
def test_formats_as_marked_by_hand(name: str):
    (encoded,) = encode(name, {"messages": CONVERSATION})
    tokens, supervised = unmark(MARKED[name])
    assert encoded.tokens.tolist() == tokens
    assert encoded.supervised.tolist() == supervised


def test_spellings_are_one_conversation():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in CONVERSATION]
    assert read_conversations(line({"conversations": shared, "id": 1})) == read_conversations(
        line({"messages": CONVERSATION})
    )


def test_a_system_message_begins_a_conversation():
    both = encode("chatml", {"messages": [*CONVERSATION, *CONVERSATION]})
    (one,) = encode("chatml", {"messages": CONVERSATION})
    assert [each.tokens.tolist() for each in both] == [one.tokens.tolist()] * 2


def test_eod_after_a_prompt_is_not_learnt():
    (encoded,) = encode("chatml", {"messages": [*CONVERSATION, {"role": "user", "content": "x"}]})
    assert encoded.tokens[-1] == EOD and encoded.supervised[-1] == 0


@pytest.mark.parametrize(
    "entry, message",
    [
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        ({"text": "a"}, "one of the keys messages and conversations; it has: text"),
        ([1], "it has: list"),
        ({"messages": CONVERSATION, "conversations": []}, "must be an object with one of the keys"),
        ({"messages": []}, "'messages' must be a list of at least one message"),
        ({"messages": "hello"}, "'messages' must be a list"),
        ({"messages": [["user", "hi"]]}, "message 1 is a list; it must be an object"),
        ({"messages": [{"content": "hi"}]}, "message 1 has role None"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "message 1 has role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "has role .*'user'"),
        ({"messages": [{"role": "user"}]}, "message 1 has content of type NoneType"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "content of type list"),
        (
            {"messages": [*CONVERSATION[:2], {"role": "assistant", "content": " "}]},
            "message 3 is an",
        ),
        ({"messages": CONVERSATION[:2]}, "without an assistant's turn teaches nothing"),
        ({"messages": [*CONVERSATION, CONVERSATION[0]]}, "without an assistant's turn"),
    ],
)
def test_malformed_lines_are_named(entry: object, message: str):
    with pytest.raises(DataError, match=message) as raised:
        encode("chatml", entry)
    assert str(raised.value).startswith("chats.jsonl:7")


def test_formats_refuse_what_they_cannot_write():
    for name in ("nemotron-h-aligned", "nemotron-nano-v2"):
        with pytest.raises(DataError, match="chats.jsonl:7: this format has no role 'tool'"):
            encode(name, {"messages": [{"role": "tool", "content": "4"}, *CONVERSATION[1:]]})
    with pytest.raises(DataError, match="an assistant's turn must follow a user's"):
        encode("nemotron-h-aligned", {"messages": [CONVERSATION[0], CONVERSATION[2]]})


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{% generation %}{{ m.content }}</t>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<{{ m.role }}>{{ m.content | trim }}</t>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def random_conversations(count: int) -> list[list[dict[str, str]]]:
    generator = random.Random(0)
    result = []
    for _ in range(count):
        turns = [{"role": "system", "content": "s"}] if generator.random() < 0.5 else []
        for _ in range(generator.randint(1, 4)):
            for role in ("user", "assistant"):
                words = generator.choices(
                    ["one", "a<b>", "ü", " ", "two\n"], k=generator.randint(1, 5)
                )
                turns.append({"role": role, "content": "x" + "".join(words)})
        result.append(turns)
    return result


def test_a_template_is_written_as_transformers_writes_it():
    pytest.importorskip("jinja2")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = TokenizersTemplate(TEMPLATE, {"bos_token": "<s>"})
    for messages in random_conversations(20):
        rendered, spans = utils.render_jinja_template(
            [messages],
            chat_template=TEMPLATE,
            return_assistant_tokens_mask=True,
            bos_token="<s>",
        )
        (encoded,) = encode(ours, {"messages": messages})
        text = bytes(encoded.tokens[:-1].tolist()).decode()
        assert text == rendered[0]
        # Ours learns what ends the turn too: the newline that the template writes behind it.
        expected = numpy.zeros(len(text), dtype=int)
        for first, last in spans[0]:
            expected[first : last + 1] = 1
        assert list(mask_of(text, encoded.supervised[:-1])) == expected.tolist()


def mask_of(text: str, supervised: numpy.ndarray) -> list[int]:
    """One bit a character, of one bit a byte."""
    starts = itertools.accumulate((len(c.encode()) for c in text), initial=0)
    return [int(supervised[start]) for start, _ in zip(starts, text, strict=False)]


def test_templates_from_a_tokenizers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("jinja2")
    settings = tmp_path / "tokenizer_config.json"

    def build():
        return build_chat_format("chat-template", str(tmp_path))

    with pytest.raises(DataError, match="holds a template; use one of nemotron-h-aligned"):
        build()
    settings.write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json is no JSON"):
        build()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    settings.write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<s>"}}))
    expected = TokenizersTemplate(TEMPLATE, {"bos_token": "<s>"}).fingerprint
    assert build().fingerprint == expected
    settings.write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert build().fingerprint == expected
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="chat template can't be read, line 1"):
        build()
    with pytest.raises(ConfigurationError, match="--sft-tokenizer-prompt-format llama"):
        build_chat_format("llama", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install megatron-packed\[sft\]"):
        build()


def test_templates_that_cannot_be_used():
    pytest.importorskip("jinja2")
    entry = {"messages": CONVERSATION}
    # Earlier answers are written otherwise once others follow.
    forgetful = "{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}"
    with pytest.raises(DataError, match="chats.jsonl:7: .* writes turn 3 otherwise"):
        encode(TokenizersTemplate(forgetful), entry)
    with pytest.raises(DataError, match="chat template fails: no system"):
        encode(TokenizersTemplate("{{ raise_exception('no system') }}"), entry)
    with pytest.raises(DataError, match="chat template fails"):
        encode(TokenizersTemplate("{{ messages[0].nothing.at_all }}"), entry)
    # A sandbox: a template is part of a downloaded tokenizer.
    with pytest.raises(DataError, match="chat template fails"):
        encode(TokenizersTemplate("{{ messages.append(1) }}"), entry)


def test_prompts_have_the_ids_of_inference():
    """A prompt's ids don't depend on the answer, even if the tokenizer would merge across."""

    class Greedy(ByteTokenizer):
        def tokenize_chat(self, text: str) -> list[int]:
            return [len(part) for part in text.split("x")]

    encoder = ConversationEncoder(Greedy(), FORMATS["identity"]())
    prompt, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cdxe"}
    (encoded,) = encoder.encode(line({"messages": [prompt, answer]}))
    assert encoded.tokens.tolist() == [2, 2, 1, EOD]
    assert encoded.supervised.tolist() == [0, 1, 1, 1]
