"""Tokenizers: loading them, encoding untrusted text, and building chat prompts as token ids.

Tool output and model text are data. If the text ``<|im_end|>`` in a web page became the control
token, a page could end the assistant's turn. Every text except the frame of the prompt is therefore
encoded by :func:`encode_plain`, which never produces an added token.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import reprlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.model.chat_template import TEMPLATE, ChatTemplateError, chat_template, render
from coa_jax.model.gguf_io import GgufFile, gguf_file

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_LARGEST = 256 << 20  # maximum bytes of a tokenizer file; the largest real files have 35 MB
_SAMPLE = "It's 1,234.5 km <b>away</b>:\n\tna\u00efve \u6771\u4eac \U0001f642"
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_ALL_FILES = (
    *_FILES,
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.json", "chat_template.jinja"),
)
"""Files that transformers opens when it loads a tokenizer, without checking their size or kind."""
_GGUF_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# Pre-tokenisation in the published tokenizer.json of Qwen2 and of Llama 3; the two treat digits
# differently.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "qwen2": _SPLIT.replace("DIGITS", r"\p{N}"),
    "llama-bpe": _SPLIT.replace("DIGITS", r"\p{N}{1,3}"),
}


@dataclasses.dataclass(frozen=True)
class ChatTokens:
    """The frame that a family of models puts around the turns of a chat.

    Attributes:
        start: control token before a turn.
        end: control token after a turn.
        assistant: name of the assistant's role.
        has_system: whether a system message is a turn. If not, its text begins the next turn.
    """

    start: str
    end: str
    assistant: str
    has_system: bool


CHATML = ChatTokens(IM_START, IM_END, "assistant", has_system=True)
GEMMA = ChatTokens("<start_of_turn>", "<end_of_turn>", "model", has_system=False)


def chat_tokens(tokenizer: Any) -> ChatTokens:
    """Returns the control tokens that a tokenizer has for the turns of a chat: ChatML's or Gemma's.

    Raises:
        UserError: the tokenizer has neither.
    """
    added = tokenizer.get_added_vocab()
    for tokens in (CHATML, GEMMA):
        if tokens.start in added and tokens.end in added:
            return tokens
    missing = IM_END if IM_START in added else IM_START
    raise UserError(
        f"the tokenizer has no control token {missing}: use a model with a ChatML vocabulary "
        "(Qwen2.5, Qwen3, SmolLM2) or Gemma's, or add the token to it"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class MissingTokenizer:
    """Placeholder for the tokenizer of a model without tokenizer files.

    Every use of the placeholder raises a `UserError`.

    Attributes:
        message: text of that error, which names the model's path and the files that were looked
            for.
    """

    message: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # attributes that Python itself looks up, e.g. in `copy`
            raise AttributeError(name)
        raise UserError(self.message)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise UserError(self.message)


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a model directory, of a GGUF file, or of an adapter's base model.

    Returns:
        A transformers ``PreTrainedTokenizerFast``.

    Raises:
        UserError: the tokenizer file is missing or damaged; the message names the file.
    """
    from coa_jax.model.adapters import read_adapter  # here: a tokenizer needs neither of these
    from coa_jax.storage import model_folder

    folder = model_folder(path, weights=False)
    tokenizer = find_tokenizer(folder)
    if isinstance(tokenizer, MissingTokenizer):
        if (adapter := read_adapter(folder)) is not None:
            return load_tokenizer(adapter.base)
        raise UserError(tokenizer.message)
    return tokenizer


def find_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a model like `load_tokenizer`, but accepts a model without tokenizer.

    For a model without tokenizer files, the result is a `MissingTokenizer`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(path)
    gguf = gguf_file(path)
    if gguf is not None:
        return gguf_tokenizer(GgufFile(gguf))
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give a model directory or a .gguf file")
    if not any((path / name).exists() for name in _FILES):
        return MissingTokenizer(
            f"{path} has no tokenizer ({', '.join(_FILES[:-1])} or {_FILES[-1]}): copy the base "
            "model's tokenizer files there"
        )
    for file in filter(Path.exists, map(path.joinpath, _ALL_FILES)):
        read = untrusted.read_json if file.suffix == ".json" else untrusted.read_bytes
        value = read(file, _LARGEST)
        if file.name == "tokenizer.json" and isinstance(value, dict):
            vocab = (value.get("model") or {}).get("vocab")
            ids = vocab.values() if isinstance(vocab, dict) else ()
            _check_largest(max((i for i in ids if isinstance(i, int)), default=0), path)
    # The classes that AutoTokenizer chooses may use only the vocabulary of tokenizer.json, and
    # replace its normaliser and pre-tokeniser. PreTrainedTokenizerFast uses the whole file.
    kind = PreTrainedTokenizerFast if (path / "tokenizer.json").exists() else AutoTokenizer
    return _checked(lambda: kind.from_pretrained(str(path), local_files_only=True), path)


def _check_largest(token: int, path: Path) -> None:
    """Refuses a token id for which a library would build, or iterate over, too large a table."""
    if token >= 1 << 22:
        raise UserError(f"{path}: its tokenizer has the token id {token}: fetch it again")


def _checked(make: Callable[[], Any], path: Path) -> Any:
    """Calls ``make`` to build the tokenizer from the files at ``path``, and checks that it works.

    Raises:
        UserError: the tokenizer cannot be built, cannot encode text, or is not a fast tokenizer.
    """
    try:
        tokenizer = make()
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{path} has no fast tokenizer: convert it to tokenizer.json")
        if not isinstance(chat_template(tokenizer), str | None):
            raise UserError(f"{path}: its chat template is not text")
        largest = max(tokenizer.get_vocab().values(), default=-1)
        if largest < 0:
            raise UserError(f"{path}: its tokenizer has no vocabulary: fetch it again")
        _check_largest(largest, path)
        # The libraries check these properties only at the first use.
        encode_plain(tokenizer, _SAMPLE), eos_ids(tokenizer)
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises bare exceptions, Rust panics
        raise UserError(
            f"{path}: its tokenizer cannot be loaded ({untrusted.reason(error)}): fetch it again"
        ) from error
    # Some released configs ask decode() to delete spaces before punctuation.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def gguf_tokenizer(file: GgufFile) -> Any:
    """Loads the tokenizer in a GGUF file; a `MissingTokenizer` if the file has none."""
    path = Path(file.where)
    model, pre = (file.metadata(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model is None:
        return MissingTokenizer(
            f"{path} has no tokenizer (field tokenizer.ggml.model): use a file that has one, or "
            "the safetensors model"
        )
    if model == "gpt2" and pre in ("smollm", *_SPLITS):
        return _checked(lambda: _byte_level_gguf(file, pre), path)
    # transformers converts other kinds of tokenizers; its reader of GGUF files needs torch.
    from transformers import AutoTokenizer

    try:
        return _checked(
            lambda: AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name), path
        )
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise UserError(
            f"{path}: a GGUF tokenizer of kind {reprlib.repr(pre)} needs the package torch: "
            "pip install torch, or use the safetensors model"
        ) from error


def _byte_level_gguf(file: GgufFile, pre: str) -> Any:
    """Builds a byte-level BPE tokenizer; ``pre`` is the name of the pre-tokenisation."""
    from gguf import TokenType
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    def get(key: str) -> Any:
        return file.metadata(f"tokenizer.ggml.{key}")

    tokens, kinds = get("tokens"), get("token_type")
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    # If a text is an entry of the vocabulary, Llama 3 encodes the text as this entry, see its
    # tokenizer.json.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    gpt2, digits = pre == "smollm", Digits(individual_digits=True)
    cut: Any = digits if gpt2 else Split(Regex(_SPLITS[pre]), behavior="isolated")
    backend.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=gpt2)])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    ids = {f"{name}_token": get(f"{key}_token_id") for name, key in _GGUF_ROLES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata("tokenizer.chat_template"),
        model_max_length=file.config.positions,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    )


_LONG = 4096
"""Number of characters from which on a text is encoded without holding Python's GIL."""


class _Plain(NamedTuple):
    """A copy of a tokenizer's model, without the added tokens.

    Attributes:
        model: the copy.
        unspelt: characters that the copy cannot encode, with their replacement; None if
            `check_joins` rejects the tokenizer.
        has_byte_fallback: whether the vocabulary is of the kind of Gemma's, see
            `_has_byte_fallback`.
    """

    model: Any
    unspelt: dict[int, str] | None
    has_byte_fallback: bool


_PLAIN: weakref.WeakKeyDictionary[Any, _Plain] = weakref.WeakKeyDictionary()


def _plain(tokenizer: Any) -> _Plain:
    """Returns a tokenizer without added tokens.

    Added tokens that are runs of white space, as Gemma has, are no control tokens and stay.

    The option ``encode_special_tokens`` of the original tokenizer does not suffice. It affects only
    tokens that are marked as special, but Qwen's ``<tool_call>`` is added without this mark. The
    option is also shared state.
    """
    if tokenizer not in _PLAIN:
        from tokenizers import Tokenizer

        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        model = spec["model"]
        kept = [
            t for t in spec["added_tokens"] if is_white_space(t["content"]) and not t["special"]
        ]
        added = {t["content"] for t in spec["added_tokens"] if t not in kept}
        spec |= {"added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
        unspelt: dict[int, str] | None = {} if _is_byte_level(spec) else None
        fallback = unspelt is None and _has_byte_fallback(spec)
        if model["type"] == "BPE":
            # The ids of added tokens must not reappear as merges, as whole words, or as the unknown
            # token.
            model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in added}
            merges = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
            model["merges"] = [
                m for m in merges if {m[0], m[1], m[0] + m[1]} <= model["vocab"].keys()
            ]
            if model.get("unk_token") in added:
                model["unk_token"] = None
            if unspelt is not None:
                # With NFC normalisation (as in Qwen), the tokens would differ from the text.
                # Without it, the ids of every text that is in NFC already stay the same.
                spec["normalizer"] = None
                unspelt = _missing_controls(model["vocab"])
            elif fallback:
                # The sign of the space would be decoded as a space.
                unspelt = {ord(_SPACE): "\ufffd"}
        _PLAIN[tokenizer] = _Plain(Tokenizer.from_str(json.dumps(spec)), unspelt, fallback)
    return _PLAIN[tokenizer]


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Returns whether the tokenizer is byte-level and adds no space before a text.

    With such a tokenizer, text can be encoded in pieces.
    """
    pre = spec.get("pre_tokenizer") or {}
    steps = [s for s in pre.get("pretokenizers", [pre]) if s.get("type") == "ByteLevel"]
    return bool(steps) and not any(step["add_prefix_space"] for step in steps)


_SPACE = "\u2581"
"""Sign for the space in the vocabularies of SentencePiece."""


def _has_byte_fallback(spec: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer spells unknown characters in bytes and adds no space, as Gemma.

    Args:
        spec: the parsed ``tokenizer.json``.
    """
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    vocab = spec["model"].get("vocab", {})
    # Of the ASCII characters, a vocabulary may have the character itself.
    spelt = all(f"<0x{b:02X}>" in vocab or (b < 128 and chr(b) in vocab) for b in range(256))
    return spec["normalizer"] == replaces and bool(spec["model"].get("byte_fallback")) and spelt


def is_white_space(token: str) -> bool:
    """Returns whether a token is white space, including the vocabulary's own mark for a space."""
    return not token.replace(_SPACE, " ").strip()


def has_byte_fallback(tokenizer: Any) -> bool:
    """Returns whether `bytes_of_token` gives the bytes of the tokens of a tokenizer."""
    return _plain(tokenizer).has_byte_fallback


def bytes_of_token(token: str) -> bytes:
    """Returns the bytes of a token of a vocabulary with bytes as a fallback, such as Gemma's."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def check_joins(tokenizer: Any) -> None:
    """Rejects a tokenizer if the joined ids of several texts do not decode to the joined texts.

    Byte-level BPE is accepted, and so is BPE with bytes as a fallback, as Gemma has. Other
    SentencePiece-style tokenizers, and byte-level BPE with ``add_prefix_space``, add a space before
    every text.

    Raises:
        UserError: the tokenizer is of another kind, or adds spaces.
    """
    if _plain(tokenizer).unspelt is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} is not byte-level, or has "
            "add_prefix_space: use a model that has byte-level BPE and adds no space (Qwen2.5, "
            "Qwen3, Llama 3, SmolLM2), or a Gemma 3"
        )


def _missing_controls(vocab: dict[str, int]) -> dict[int, str]:
    """Returns the ASCII bytes without a token, which would vanish from the text.

    SmolLM2, for example, lacks six of them.
    """
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        code: "\ufffd"
        for code in range(128)
        if byte_level.pre_tokenize_str(chr(code))[0][0] not in vocab
    }


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Encodes text literally, so that no text produces an added or special token.

    If `check_joins` accepts the tokenizer, the ids decode to exactly ``text``, with exceptions that
    become U+FFFD: lone surrogates, which UTF-8 cannot encode, and characters that the vocabulary
    cannot spell, such as control bytes.

    Args:
        tokenizer: a tokenizer from :func:`load_tokenizer`.
        text: any text.

    Raises:
        UserError: a regular expression of the tokenizer needs too many steps for this text.
    """
    plain, unspelt, _ = _plain(tokenizer)
    if unspelt:
        text = text.translate(unspelt)
    try:
        return _ids(plain, text)
    except TypeError:  # raised by the Rust library for lone surrogates
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _ids(plain, text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the Rust library exports no such class
            raise
        raise UserError(f"the tokenizer cannot encode a text: {untrusted.reason(error)}") from None


def _ids(plain: Any, text: str) -> list[int]:
    if len(text) < _LONG:
        return plain.encode(text, add_special_tokens=False).ids
    # Of the two methods only encode_batch_fast releases Python's GIL; for short texts it is slower.
    return plain.encode_batch_fast([text], add_special_tokens=False)[0].ids


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes token ids to text, with control tokens, and without cleaning up spaces."""
    if has_byte_fallback(tokenizer):
        # The library replaces a whole run of bytes if a single byte is wrong.
        tokens = tokenizer.convert_ids_to_tokens(list(map(int, ids)))
        return b"".join(map(bytes_of_token, filter(None, tokens))).decode("utf-8", "replace")
    return tokenizer.backend_tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


def end_of_turn_id(tokenizer: Any) -> int:
    """Returns the id of the token that ends every chat turn, such as ``<|im_end|>``.

    Raises:
        UserError: the tokenizer has no such token.
    """
    return tokenizer.get_added_vocab()[chat_tokens(tokenizer).end]


def eos_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of the tokens that end a generation: end of turn, and end of text."""
    added = tokenizer.get_added_vocab()
    ends = added.get(CHATML.end), added.get(GEMMA.end)
    ids = [*ends, tokenizer.eos_token_id, added.get(END_OF_TEXT)]
    return list(dict.fromkeys(i for i in ids if i is not None))


@functools.lru_cache(maxsize=64)
def stock_prompt(template: str | None, tokenizer: Any) -> tuple[tuple[int, ...], str]:
    """Returns a chat template's token ids before the first turn, and its default system message.

    Args:
        template: Jinja source of the chat template; None if the tokenizer has none.
        tokenizer: the tokenizer, which gives the template the names of its special tokens.

    Returns:
        A pair: a tuple with the id of ``bos_token``, or () if a conversation begins with a turn;
        and the default system message, or "" if there is none.

    Raises:
        UserError: the template cannot be rendered, or its text does not begin with a turn.
    """
    chat = chat_tokens(tokenizer)
    if not template or template == TEMPLATE:
        # Gemma was trained with its first token, which base models need too.
        needed = not chat.has_system and tokenizer.bos_token_id is not None
        return (tokenizer.bos_token_id,) if needed else (), ""
    marker = "stock-system-probe"
    names = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    try:
        text = render(
            template, [{"role": "user", "content": marker}], add_generation_prompt=True, **names
        )
    except ChatTemplateError as error:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} cannot be used: {error}"
        ) from error
    before, start, rest = text.partition(marker)[0].partition(chat.start)
    if not start or before not in ("", tokenizer.bos_token):
        raise UserError(
            f"the tokenizer's chat template begins with {text[:40]!r}: a conversation begins with "
            f"{chat.start}, or with the tokenizer's bos_token before it"
        )
    frame = "system\n"
    system = rest[len(frame) :].partition(chat.end)[0] if rest.startswith(frame) else ""
    return (tokenizer.bos_token_id,) if before else (), system


def conversation_ids(
    tokenizer: Any, turns: Sequence[tuple[str, str]], *, prefix: str | None = ""
) -> list[int]:
    """Returns the prompt ids of a conversation, up to a turn that the assistant can continue.

    The conversation is framed by ChatML, or by Gemma's turn tokens: control tokens have their own
    ids, and the contents of turns are encoded as plain text.

    Args:
        tokenizer: a tokenizer from :func:`load_tokenizer`.
        turns: (role, content) pairs. If the first turn is not a system turn, the default system
            message of the chat template is added; an empty system turn is left out.
        prefix: text with which the assistant's open turn begins. With "", the result ends with the
            header of the open turn; with None, there is no open turn.

    Raises:
        UserError: the tokenizer has no control tokens of turns, its chat template does not begin
            with a turn, or `check_joins` rejects the tokenizer.
    """
    chat_tokens(tokenizer)  # fails first for a model without turns
    check_joins(tokenizer)
    before, system = stock_prompt(chat_template(tokenizer), tokenizer)
    if not turns or turns[0][0] != "system":
        turns = [("system", system), *turns]
    return [*before, *turn_ids(tokenizer, turns, prefix=prefix)]


def turn_ids(
    tokenizer: Any, turns: Sequence[tuple[str, str]], *, prefix: str | None = ""
) -> list[int]:
    """Returns the ids of further turns, which continue a conversation from `conversation_ids`.

    Args:
        tokenizer: a tokenizer from :func:`load_tokenizer`.
        turns: (role, content) pairs.
        prefix: text with which the assistant's open turn begins. With "", the result ends with the
            header of the open turn; with None, there is no open turn.
    """
    chat, vocabulary = chat_tokens(tokenizer), tokenizer.get_added_vocab()
    start, end = vocabulary[chat.start], vocabulary[chat.end]
    newline, ids = encode_plain(tokenizer, "\n"), list[int]()
    for role, content in turns if chat.has_system else _without_system(turns):
        if role != "system" or content:
            role = chat.assistant if role == "assistant" else role
            ids += [start, *encode_plain(tokenizer, f"{role}\n{content}"), end, *newline]
    if prefix is None:
        return ids
    # The prefix is encoded separately, because in training the policy's tokens follow the encoded
    # opening.
    opening = [start, *encode_plain(tokenizer, f"{chat.assistant}\n")]
    return [*ids, *opening, *encode_plain(tokenizer, prefix)]


def _without_system(turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Puts system messages before the text of the next turn, as the chat template of Gemma does."""
    messages, before = list[tuple[str, str]](), ""
    for role, content in turns:
        if role == "system":
            before += f"{content}\n\n" if content else ""
        else:
            messages.append((role, f"{before}{content.strip()}"))
            before = ""
    return [*messages, ("user", before.strip())] if before else messages
