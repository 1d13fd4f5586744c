"""Conversations as token ids: each turn's prompt is the one before, the answer really given, and what the user says next.

Built from tokens, not by tokenising the whole text anew: otherwise a token boundary could shift inside the history and
what was computed before would not be a prefix of the next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER: Final = "THE-ANSWER-GOES-HERE"


class ChatFormat:
    """The tokens a chat model expects around what is said.

    Args:
        tokenizer: of the model. Without a chat template of its own, plain "User:" and "Assistant:" lines are used.
        stop_tokens: an answer's last token is left out of the history when it is one of these; the template brings its own.

    Raises:
        ConfigError: the tokenizer's chat template cannot be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_tokens = stop_tokens

    def opening(self, system: str, user: str) -> list[int]:
        """Prompt of a first turn."""
        return self._encode(self._render([("system", system), ("user", user)]))

    def next_turn(self, prompt: Sequence[int], answer: Sequence[int], user: str) -> list[int]:
        """Prompt of the turn that follows an answer."""
        said = answer[:-1] if answer and answer[-1] in self._stop_tokens else answer
        return [*prompt, *said, *self._encode(self._between(user))]

    def _between(self, user: str) -> str:
        """What stands between the end of an answer and the beginning of the next."""
        text = self._render([("system", "s"), ("user", "u"), ("assistant", _ANSWER), ("user", user)])
        _before, found, after = text.partition(_ANSWER)
        if not found:
            raise ConfigError("the model's chat template does not show an earlier answer; the demo needs one that does")
        return after

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in messages) + "\n\nAssistant:"
        from jinja2 import TemplateError
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            # Some templates know no system role: its text goes in front of the first question.
            turns[1]["content"] = f"{turns[0]['content']}\n\n{turns[1]['content']}"
            try:
                rendered = self._tokenizer.apply_chat_template(turns[1:], tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise ConfigError(f"the model's chat template cannot be used ({error}); use a chat model") from error
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)  # the template has written the special tokens
        return [int(token) for token in ids]


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer, by the model's generation settings and its tokenizer."""
    found: set[int] = set()
    for ends in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(ends, int):
            found.add(ends)
        elif isinstance(ends, list | tuple):
            found.update(int(end) for end in ends)
    return frozenset(found)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts share."""
    length = 0
    for tokens in zip(*prompts, strict=False):
        if any(token != tokens[0] for token in tokens):
            break
        length += 1
    return length
