"""Small real tokenizers, trained on the spot: byte-level BPE as in Llama 3, byte-fallback BPE as in Llama 2."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "user assistant system: what is the capital of France? The capital of France is Paris.",
    "Größe, Straße, façade, naïve, 東京は日本の首都です。 Привет, мир! 👩‍👩‍👧 🙂🙃 مرحبا",
    "def f(x):\n    return x ** 2  # square\n\n1, 2, 3, 42, 1000",
] * 4


def byte_level(vocab_tokens: int = 512, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with three special tokens (ids 0, 1, 2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    return fast


def byte_fallback(vocab_tokens: int = 500) -> PreTrainedTokenizerFast:
    """SentencePiece style: spaces are part of tokens, the first space is stripped, unknown characters fall to bytes."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens, special_tokens=[AddedToken("<unk>"), AddedToken("<s>"), *byte_tokens],
        show_progress=False, limit_alphabet=60,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    # The byte tokens must be ordinary tokens, or decoding would leave them out as special.
    state = tokenizer.to_str().replace("\n", "")
    import json

    plain = json.loads(state)
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(plain)), bos_token="<s>")
