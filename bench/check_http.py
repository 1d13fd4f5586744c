"""``vllm serve`` as ``kvtier check`` sees it, over HTTP."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any, Final

from kvtier.bench.check_engine import Answer, EngineTrouble, Order, Prompt
from kvtier.bench.check_metrics import Metrics, parse_metrics
from kvtier.bench.demo_text import USERS
from kvtier.bench.web_address import HIDDEN, WebAddress, opener, request_to, without_secrets
from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown

FIRST_SECONDS: Final = 10.0
"""For the first questions, which cost an engine nothing."""

_MOST_BYTES: Final = 256 << 20  # of an answer
_MOST_SAID: Final = 300  # of its message, letters
_PROBE_WORDS: Final = 64
_WORDS: Final = tuple(sorted({word for user in USERS for text in user.turns for word in text.lower().split() if word.isalpha()}))


class HttpEngine:
    """A server. See ``CheckedEngine``.

    Args:
        url: its address, such as http://127.0.0.1:8000.
        model: one of those it serves; the first when None.
        api_key: sent along if the server wants one.
        probe_seconds: for the first, short request; a minute when None.

    Raises:
        ConfigError: no such address, a key that cannot be one, none of these models.
        EngineTrouble: no server, no answer of vLLM, a key that is missing or wrong.
    """

    is_shared = True

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None,
                 probe_seconds: float | None = None) -> None:
        address = server_address(url)
        self.name = self._url = address.url
        if api_key and not (api_key.isascii() and api_key.isprintable()):  # the message must not show it
            raise ConfigError("--api-key or VLLM_API_KEY: holds a line end or a character that no key has; give the key alone")
        if api_key and address.headers:
            raise ConfigError("--url names a user, and --api-key or VLLM_API_KEY a key: a request carries one of them; leave the other out")
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else address.headers
        self._secrets = tuple(value.partition(" ")[2] for value in self._authorization.values())
        self._opener = opener()
        served = self._models()
        names = [str(each["id"]) for each in served]
        if model is not None and model not in names:
            raise ConfigError(f"--model {model}: {self._url} serves {', '.join(names)}; name one of these")
        chosen = served[names.index(model) if model is not None else 0]
        self.model = str(chosen["id"])
        self.max_tokens = int(chosen.get("max_model_len") or 2048)
        probe = Order(_text(random.Random(), _PROBE_WORDS), "kvtier-check-probe", reads=False, writes=False)
        seconds = 6 * FIRST_SECONDS if probe_seconds is None else probe_seconds
        self._tokens_per_word = self.ask(probe, seconds).prompt_tokens / _PROBE_WORDS

    def make_prompt(self, rng: random.Random, num_tokens: int) -> Prompt:
        return _text(rng, max(int(num_tokens / self._tokens_per_word), 1))

    def ask(self, order: Order, seconds: float) -> Answer:
        body: dict[str, Any] = {"model": self.model, "prompt": order.prompt, "max_tokens": order.num_tokens, "min_tokens": order.num_tokens,
                                "temperature": 0.0, "ignore_eos": True, "logprobs": 2, "return_token_ids": True, "cache_salt": order.salt}
        if order.transfer_params is not None:
            body["kv_transfer_params"] = order.transfer_params
        answer = self._json("/v1/completions", seconds, body)
        try:
            choice = answer["choices"][0]
            logprobs = choice["logprobs"]
            gaps = tuple(_gap(candidates) for candidates in logprobs["top_logprobs"])
            return Answer(tuple(map(int, choice["token_ids"])), tuple(map(float, logprobs["token_logprobs"])), gaps,
                          int(answer["usage"]["prompt_tokens"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineTrouble(f"{self._url}/v1/completions: an answer without token ids or log-probabilities ({error!r}); is this "
                                "vLLM 0.32 or newer?") from error

    def metrics(self, seconds: float) -> Metrics:
        try:
            return parse_metrics(self._ask("/metrics", seconds).decode("utf-8", "replace"))
        except ValueError as error:
            raise EngineTrouble(f"{self._url}/metrics: these are no metrics ({error}); is this the address of vLLM itself?") from error

    def reset(self, seconds: float) -> bool | None:
        try:
            answer = self._json("/reset_prefix_cache", seconds, {})
        except EngineTrouble as error:
            if isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code in (403, 404, 405):
                return None
            raise
        return bool(answer.get("success", True))

    def _without_key(self, text: str) -> str:
        """A server may repeat what it was sent."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _models(self) -> list[dict[str, Any]]:
        found = self._json("/v1/models", FIRST_SECONDS).get("data")
        models = [each for each in found if isinstance(each, dict) and "id" in each] if isinstance(found, list) else []
        if not models:
            raise EngineTrouble(f"{self._url}/v1/models: no model is served there; is this the address of vLLM itself?")
        return models

    def _json(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        text = self._ask(path, seconds, body)
        try:
            answer = json.loads(text or b"{}")
            if isinstance(answer, dict):
                return answer
        except ValueError:
            pass
        raise EngineTrouble(f"{self._url}{path}: the answer is no JSON object; is this the address of vLLM itself?")

    def _ask(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = request_to(self._url + path, self._authorization, data, **{"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=max(seconds, 0.001)) as answer:
                return bytes(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            said = self._without_key(f"{error.code} {error.reason}{_message(error)}")[:_MOST_SAID]
            if error.code in (401, 403) and path != "/reset_prefix_cache":
                said += "; give the server's key with --api-key, or in VLLM_API_KEY"
            raise EngineTrouble(f"{self._url}{path}: HTTP {said}") from error
        except TimeoutError as error:
            raise EngineTrouble(f"{self._url}{path}: no answer within {seconds:.0f} s; is the engine busy, or stuck? --timeout waits longer"
                                ) from error
        except OSError as error:  # URLError is one
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise EngineTrouble(f"{self._url}{path}: no connection within {seconds:.0f} s; is the address right?") from error
            raise EngineTrouble(f"{self._url}{path}: no answer ({reason}); is the server running, and at this address?") from error
        except Exception as error:  # http.client's own: half an answer, a line that is no HTTP
            raise EngineTrouble(f"{self._url}{path}: no answer of a web server ({error!r}); is the address right?") from error


def server_address(text: str) -> WebAddress:
    """``HOST:PORT`` means http, and a path such as /v1 is left away, as is what stands behind a question mark.

    Raises:
        ConfigError: no such address.
    """
    try:
        address = WebAddress.read(text)
    except ValueError as error:
        raise ConfigError(f"--url {shown(without_secrets(text))}: no address of a server ({error}); write for example "
                          "http://127.0.0.1:8000") from None
    return replace(address, path=address.path.rstrip("/").removesuffix("/v1"), query="")


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def _gap(candidates: dict[str, float] | None) -> float:
    values = sorted((candidates or {}).values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else float("inf")


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about it, in one line."""
    try:
        text = error.read(4096).decode("utf-8", "replace")
        given = json.loads(text)
        said = given.get("error", given) if isinstance(given, dict) else text
        said = said.get("message", said) if isinstance(said, dict) else said
    except (OSError, ValueError):
        return ""
    return f": {' '.join(str(said).split())}"
