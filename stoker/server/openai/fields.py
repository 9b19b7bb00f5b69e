"""The fields that chat completions and completions share: what they may be, and those that are refused by name.

A field is honoured, or refused. `user`, `metadata` and their like change no answer here and are accepted.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stoker.server.errors import RequestError

MOST_CHOICES = 128
MOST_STOPS = 16
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


def _false(value: Any) -> Any:
    if value is False or value is None:
        return value
    raise ValueError("input should be False")


# A switch that can only be off; 0 is a number.
Off = Annotated[Literal[False], BeforeValidator(_false)]

# Fields of OpenAI's API that would change the answer, or promise something, and are not there: why.
UNSUPPORTED = {
    "audio": "the answer is text",
    "best_of": "give n instead",
    "function_call": "it is deprecated; use tool_choice",
    "functions": "it is deprecated; use tools",
    "moderation": "there is no moderation here",
    "prediction": "there are no predicted outputs here",
    "suffix": "the model continues text; it does not fill gaps",
    "verbosity": "ask for short or long answers in a message",
    "web_search_options": "there is no web search here",
}


class Strict(BaseModel):
    """Nothing unknown, nothing converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """include_progress: events with prompt tokens as they are computed (an extension)."""

    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: Off = False


class Sampling(Strict):
    """How tokens are drawn; None: not asked. Extensions of OpenAI's API: top_k, min_p, repetition_penalty, ignore_eos,
    cache_prompt."""

    model: str | None = Field(None, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def asked(self, logprobs: int | None, choice: int = 0) -> dict[str, Any]:
        """Names of SamplingOptions for one choice. Each choice draws by itself: the seed counts up."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias) if self.logit_bias else None,
            "seed": None if self.seed is None else (self.seed + choice) % 2**63,
            "logprobs": logprobs,
        }

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("it means nothing without stream", field="stream_options", code="invalid_value")


def _biases(asked: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in asked.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError("not a token id", field="logit_bias", code="invalid_value", got=repr(token[:40]))
        if not -100 <= bias <= 100:
            raise RequestError(
                "a bias lies outside its range",
                field="logit_bias",
                code="invalid_value",
                expected="-100 to 100",
                got=bias,
            )
        biases[int(token)] = float(bias)
    return biases


def refuse_unsupported(body: dict[str, Any], allowed: tuple[str, ...] = ()) -> None:
    """Raises RequestError for the first field that is known and not supported. null means not given."""
    for name, why in UNSUPPORTED.items():
        if body.get(name) is not None and name not in allowed:
            raise RequestError(f"not supported: {why}", field=name, code="unsupported_field")
        if name in body and name not in allowed:
            del body[name]
