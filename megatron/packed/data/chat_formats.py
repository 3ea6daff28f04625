"""How a conversation is written as text, and which of it a model learns to write.

A format turns messages into pieces of text, each supervised or not. Pieces are tokenized one by
one, so that a prompt has the ids it has at inference, where nothing follows it, and no token is
half supervised.
"""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.packed.errors import ConfigurationError, DataError

PROMPT_ROLES = ("system", "user", "tool")


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Piece:
    """A run of text that is supervised, or isn't."""

    text: str
    supervised: bool


class ChatFormat(ABC):
    """One way to write conversations.

    Attributes:
        name: as `--sft-tokenizer-prompt-format` has it.
    """

    name: str

    @abstractmethod
    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation.

        Args:
            messages: at least one.

        Raises:
            DataError: if the format can't write it; the caller adds where it was read.
        """

    @property
    def fingerprint(self) -> str:
        """What tells this format from another of the same name."""
        return self.name


class Identity(ChatFormat):
    """Contents and nothing else."""

    name = "identity"

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation."""
        return [Piece(each.content, each.role == "assistant") for each in messages]


class ChatML(ChatFormat):
    """`<|im_start|>role`, the content, `<|im_end|>`; the end of a turn is learnt with it."""

    name = "chatml"

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation."""
        pieces = []
        for each in messages:
            pieces += [
                Piece(f"<|im_start|>{each.role}\n", False),
                Piece(f"{each.content}<|im_end|>", each.role == "assistant"),
                Piece("\n", False),
            ]
        return pieces


class NemotronHAligned(ChatFormat):
    """Upstream's default: the user's turn ends with the assistant's heading."""

    name = "nemotron-h-aligned"

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation."""
        pieces = []
        for place, each in enumerate(messages):
            text = each.content.strip() + "\n"
            if each.role == "assistant":
                if place == 0 or messages[place - 1].role != "user":
                    raise DataError("an assistant's turn must follow a user's in this format")
                pieces.append(Piece(text, True))
            elif each.role == "system":
                pieces.append(Piece(f"<SPECIAL_10>System\n{text}", False))
            elif each.role == "user":
                heading = "<SPECIAL_11>Assistant\n"
                pieces.append(Piece(f"<SPECIAL_11>User\n{text}{heading}", False))
            else:
                raise DataError(f"this format has no role {each.role!r}")
        return pieces


class NemotronNanoV2(ChatFormat):
    """Upstream's format of that name: turns end with `<SPECIAL_12>`."""

    name = "nemotron-nano-v2"

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation."""
        pieces = []
        for each in messages:
            if each.role == "assistant":
                pieces.append(Piece("<SPECIAL_11>Assistant\n", False))
                pieces.append(Piece(each.content.strip() + "\n<SPECIAL_12>\n", True))
                continue
            headings = {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n"}
            if each.role not in headings:
                raise DataError(f"this format has no role {each.role!r}")
            plain = each.content.replace("/think", "").replace("/no_think", "").strip()
            pieces.append(Piece(f"{headings[each.role]}{plain}\n", False))
        return pieces


class TokenizersTemplate(ChatFormat):
    """The Jinja template of the tokenizer's own files.

    What the template writes for an assistant's turn is found as a difference: the conversation up
    to the turn with the generation prompt, and the conversation with it.

    Args:
        template: Jinja text.
        variables: what templates read beside the messages, such as `bos_token`.

    Raises:
        ConfigurationError: if jinja2 isn't installed.
        DataError: if the template can't be read.
    """

    name = "chat-template"

    def __init__(self, template: str, variables: dict[str, Any] | None = None) -> None:
        self._text = template
        self._variables = dict(variables or {})
        self._template = _compile(template)

    @property
    def fingerprint(self) -> str:
        """The template and its variables."""
        return json.dumps([self.name, self._text, self._variables], sort_keys=True)

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Write a conversation."""
        whole = self._render(messages, prompt=False)
        pieces: list[Piece] = []
        at = 0
        for place, each in enumerate(messages):
            if each.role != "assistant":
                continue
            before = self._render(messages[:place], prompt=True) if place else ""
            after = self._render(messages[: place + 1], prompt=False)
            if not after.startswith(before) or not whole.startswith(after) or len(before) < at:
                raise DataError(
                    f"the tokenizer's chat template writes turn {place + 1} otherwise when others "
                    "follow, so it can't be told from its prompt; use another "
                    "--sft-tokenizer-prompt-format, such as chatml"
                )
            pieces.append(Piece(whole[at : len(before)], False))
            pieces.append(Piece(whole[len(before) : len(after)], True))
            at = len(after)
        return [*pieces, Piece(whole[at:], False)]

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[{"role": each.role, "content": each.content} for each in messages],
                add_generation_prompt=prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            reason = str(error) or type(error).__name__
            raise DataError(f"the tokenizer's chat template fails: {reason}") from error


FORMATS: dict[str, type[ChatFormat]] = {
    each.name: each for each in (NemotronHAligned, NemotronNanoV2, ChatML, Identity)
}


def _compile(template: str) -> Any:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigurationError(
            "--sft-tokenizer-prompt-format chat-template needs the jinja2 library: "
            "pip install megatron-packed[sft]"
        ) from error

    class Generation(Extension):
        """`{% generation %}` marks assistants' turns for other programs; it writes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Keep the body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(
        value, ensure_ascii=False, **kwargs
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.date.today().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the tokenizer's chat template can't be read, line {error.lineno}: {error.message}"
        ) from error
    except RecursionError as error:
        raise DataError("the tokenizer's chat template can't be read: nested too deeply") from error
