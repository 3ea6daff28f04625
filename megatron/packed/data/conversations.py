"""JSON lines of conversations to token ids, and which of them are supervised."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron.packed.data.chat_formats import (
    FORMATS,
    PROMPT_ROLES,
    ChatFormat,
    Message,
    TokenizersTemplate,
)
from megatron.packed.data.json_lines import JsonLine
from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.data.vocabulary_files import read_settings
from megatron.packed.errors import ConfigurationError, DataError

KEYS = ("messages", "conversations")
# The names that data sets use, and the four that formats know.
_ROLES = {
    **{role: role for role in (*PROMPT_ROLES, "assistant")},
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, eq=False)
class Encoded:
    """A conversation as ids.

    Attributes:
        tokens: int64 `[n]`.
        supervised: uint8 `[n]`, 1 where the token is one the model learns to write.
    """

    tokens: numpy.ndarray
    supervised: numpy.ndarray


def read_conversations(line: JsonLine) -> list[list[Message]]:
    """The conversations of one line: a new one begins with each system message.

    Args:
        line: an object with `messages`, or `conversations`: a list of `{role, content}`, or of
            `{from, value}`.

    Raises:
        DataError: naming the line and what is wrong with it.
    """
    entry = line.parse()
    found = [key for key in KEYS if isinstance(entry, dict) and key in entry]
    if len(found) != 1:
        held = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise DataError(
            f"{line.source}: must be an object with one of the keys {' and '.join(KEYS)}; "
            f"it has: {held}"
        )
    turns = entry[found[0]]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{line.source}: {found[0]!r} must be a list of at least one message")
    messages = [_message(f"{line.source}: message {n}", t) for n, t in enumerate(turns, start=1)]
    conversations: list[list[Message]] = []
    for message in messages:
        if message.role == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    for conversation in conversations:
        if all(message.role != "assistant" for message in conversation):
            raise DataError(
                f"{line.source}: a conversation without an assistant's turn teaches nothing; "
                "remove it"
            )
    return conversations


def _message(where: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is a {type(turn).__name__}; it must be an object")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise DataError(
            f"{where} has role {role!r}; it must be one of {', '.join(sorted(set(_ROLES)))}"
        )
    if not isinstance(content, str):
        raise DataError(
            f"{where} has content of type {type(content).__name__}; it must be a string"
        )
    role = _ROLES[role.lower()]
    if role == "assistant" and not content.strip():
        raise DataError(f"{where} is an empty turn of the assistant; remove it")
    return Message(role, content)


class ConversationEncoder:
    """Writes conversations in a format and tokenizes them.

    Args:
        tokenizer: text to ids.
        chat_format: how conversations are written.
    """

    def __init__(self, tokenizer: PackedTokenizer, chat_format: ChatFormat) -> None:
        self.tokenizer = tokenizer
        self.chat_format = chat_format

    def encode(self, line: JsonLine) -> list[Encoded]:
        """The conversations of a line, each ended by EOD.

        EOD is supervised after an assistant's turn, where the model must learn to stop.

        Args:
            line: see `read_conversations`.

        Raises:
            DataError: naming the line and what is wrong with it.
        """
        return [self._encode(line, messages) for messages in read_conversations(line)]

    def _encode(self, line: JsonLine, messages: Sequence[Message]) -> Encoded:
        try:
            pieces = self.chat_format.render(messages)
        except DataError as error:
            raise DataError(f"{line.source}: {error}") from error
        tokens: list[int] = []
        supervised: list[int] = []
        # Prompts that follow each other are one text.
        runs: list[tuple[str, bool]] = []
        for piece in pieces:
            if runs and runs[-1][1] == piece.supervised:
                runs[-1] = (runs[-1][0] + piece.text, piece.supervised)
            else:
                runs.append((piece.text, piece.supervised))
        for text, learnt in runs:
            ids = self.tokenizer.tokenize_chat(text)
            tokens += ids
            supervised += [int(learnt)] * len(ids)
        if not tokens or tokens[-1] != self.tokenizer.eod:
            tokens.append(self.tokenizer.eod)
            supervised.append(int(messages[-1].role == "assistant"))
        return Encoded(
            numpy.array(tokens, dtype=numpy.int64), numpy.array(supervised, dtype=numpy.uint8)
        )


def build_chat_format(name: str, tokenizer_model: str | None) -> ChatFormat:
    """The format that `--sft-tokenizer-prompt-format` names.

    Args:
        name: one of `FORMATS`, or `chat-template` for the tokenizer's own.
        tokenizer_model: `--tokenizer-model`.

    Raises:
        ConfigurationError: if the format is unknown.
        DataError: if the tokenizer has no template, or it can't be read.
    """
    if name in FORMATS:
        return FORMATS[name]()
    if name != TokenizersTemplate.name:
        raise ConfigurationError(
            f"--sft-tokenizer-prompt-format {name}: must be one of "
            f"{', '.join([*FORMATS, TokenizersTemplate.name])}"
        )
    folder = Path(tokenizer_model or ".")
    folder = folder if os.path.isdir(folder) else folder.parent
    path = folder / "tokenizer_config.json"
    settings = read_settings(path)
    template = settings.get("chat_template")
    own_file = folder / "chat_template.jinja"
    if os.path.isfile(own_file):
        try:
            template = own_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{own_file} can't be read ({error}); repair or remove it") from error
    if isinstance(template, list):  # several, by name
        named = [each for each in template if isinstance(each, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise DataError(
            f"--sft-tokenizer-prompt-format chat-template: neither {path} nor {own_file.name} "
            f"beside it holds a template; use one of {', '.join(FORMATS)}"
        )
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    variables = {name: _text_of(settings.get(name)) for name in names}
    return TokenizersTemplate(template, {k: v for k, v in variables.items() if v is not None})


def _text_of(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
