"""Text out of tokens: pieces add up, characters stay whole, stop strings never leak, templates are safe."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stoker.errors import OptionError
from stoker.generate.chat_template import chat_ids, chat_text, has_chat_template
from stoker.generate.detokenize import Detokenizer
from stoker.generate.stops import StopStrings
from tests.generate.tokenizers_ import byte_fallback, byte_level

TEXTS = [
    "plain words, nothing else",
    "Größe 東京 Привет 👩‍👩‍👧 مرحبا",
    "   leading and trailing   ",
    "🙂" * 40,
    "a\n\n\tb   c",
    "ends in a real replacement mark \ufffd",
    "\ufffd\ufffd and begins with two",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ✓ 한국어",
]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_level() if request.param == "byte_level" else byte_fallback()


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_characters_stay_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text, "the tokenizer itself must round-trip, or this test shows nothing"
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    if text.isascii():
        assert sum(bool(piece) for piece in pieces) > len(ids) // 2, "text must come out as it becomes certain"


def test_multi_byte_characters_come_out_with_their_last_token() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("한", add_special_tokens=False)
    assert len(ids) == 3, "three bytes, three tokens"
    assert pieces_of(tokenizer, ids) == ["", "", "한", ""]


def test_a_continuation_keeps_its_space() -> None:
    tokenizer = byte_fallback()
    whole = tokenizer.encode("the best of times", add_special_tokens=False)
    for cut in range(1, len(whole)):
        said = "".join(pieces_of(tokenizer, whole[cut:], whole[:cut]))
        assert tokenizer.decode(whole[:cut]) + said == "the best of times"


@given(st.lists(st.integers(3, 511), max_size=120), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_any_tokens_add_up(ids: list[int], prompt_tokens: int) -> None:
    """Random byte-level tokens, most of them not UTF-8 at all, give what decoding at once gives."""
    tokenizer = _BYTE_LEVEL
    prompt = tokenizer.encode("the quick brown fox", add_special_tokens=False)[:prompt_tokens]
    assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids, prompt)) == tokenizer.decode(prompt + ids)


_BYTE_LEVEL = byte_level()


@pytest.mark.parametrize("seed", range(6))
def test_long_runs_of_broken_bytes_add_up_too(seed: int) -> None:
    """Continuation bytes, lead bytes and whole characters in one long run without a clean end."""
    rng = random.Random(seed)
    alphabet = [bytes([value]) for value in (0x80, 0x9F, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF)] + [c.encode() for c in "é한🙂"]
    table = {byte: char for byte, char in zip(range(256), _byte_characters(), strict=True)}
    stream = b"".join(rng.choice(alphabet) for _ in range(300))
    ids = [_BYTE_LEVEL.convert_tokens_to_ids(table[value]) for value in stream]
    pieces = pieces_of(_BYTE_LEVEL, ids)
    assert "".join(pieces) == _BYTE_LEVEL.decode(ids) == stream.decode("utf-8", errors="replace")


def _byte_characters() -> list[str]:
    """GPT-2's table from bytes to printable characters, read off the tokenizer library itself."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[value] for value in range(256)]


def test_special_tokens_are_silent_or_shown() -> None:
    tokenizer = byte_level()
    ids = [1, *tokenizer.encode("fox", add_special_tokens=False), 2]
    assert "".join(pieces_of(tokenizer, ids)) == "fox"
    loud = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(loud.push(token) for token in ids) + loud.finish() == "<|im_start|>fox<|im_end|>"


class CountingTokenizer:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("token", ["Ġfox", "\u0122"])
def test_cost_grows_linearly(token: str) -> None:
    """Twice the tokens, twice the work; a detokenizer that decodes everything each time would do four times as much."""
    ident = _BYTE_LEVEL.convert_tokens_to_ids(token) or _BYTE_LEVEL.encode("the", add_special_tokens=False)[0]

    def work(count: int) -> int:
        counting = CountingTokenizer(_BYTE_LEVEL)
        detokenizer = Detokenizer(counting)
        text = "".join([detokenizer.push(ident) for _ in range(count)] + [detokenizer.finish()])
        assert text == _BYTE_LEVEL.decode([ident] * count)
        return counting.decoded

    assert work(4000) < 2.2 * work(2000)
    assert work(2000) < 2000 * 64


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All that goes out, and the stop string that ended it."""
    watcher, out = StopStrings(stops), ""
    for piece in pieces:
        out += watcher.push(piece)
        if watcher.hit is not None:
            return out, watcher.hit
    return out + watcher.finish(), None


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab\n", max_size=4), max_size=20),
)
@settings(max_examples=400)
def test_stop_strings_against_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    """The output ends before the first complete stop string, wherever the pieces are cut."""
    text = "".join(pieces)
    out, hit = run_stops(stops, pieces)
    complete = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if complete is None:
        assert (out, hit) == (text, None)
    else:
        assert hit in stops and text.startswith(out + hit)
        assert not any(stop in out for stop in stops)
        assert len(out) + len(hit) <= max(complete, len("".join(pieces[: _pieces_until(pieces, complete)])))


def _pieces_until(pieces: list[str], length: int) -> int:
    total = 0
    for index, piece in enumerate(pieces):
        total += len(piece)
        if total >= length:
            return index + 1
    return len(pieces)


def test_text_is_held_back_only_while_it_may_be_a_stop() -> None:
    watcher = StopStrings(["</answer>"])
    assert [watcher.push(p) for p in ["42", " <", "b> </ans", "wer"]] == ["42", " ", "<b> ", ""]
    assert watcher.push("!") == "</answer!"[:-1] + "!"
    assert watcher.finish() == "" and watcher.hit is None


def test_messages_become_the_models_own_text() -> None:
    tokenizer = byte_level()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat_text(tokenizer, messages) == text
    ids = chat_ids(tokenizer, messages)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2, "special tokens are single tokens"
    assert tokenizer.decode(ids) == text


def test_template_errors_are_option_errors() -> None:
    message = [{"role": "user", "content": "Hi"}]
    bare = byte_level(chat_template=None)
    assert not has_chat_template(bare) and has_chat_template(byte_level())
    with pytest.raises(OptionError, match="no chat template"):
        chat_text(bare, message)
    strict = byte_level(
        chat_template="{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    with pytest.raises(OptionError, match="no system role"):
        chat_text(strict, [{"role": "system", "content": "x"}, *message])
    for bad in ([], ["Hi"], [{"content": "Hi"}], [{"role": "user"}]):
        with pytest.raises(OptionError, match="message"):
            chat_text(byte_level(), bad)


def test_templates_run_in_a_sandbox() -> None:
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append('x') %}",
    ):
        with pytest.raises(OptionError, match="refuses these messages"):
            chat_text(byte_level(chat_template=attack), [{"role": "user", "content": "Hi"}])
