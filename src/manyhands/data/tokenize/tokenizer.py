"""Loads a tokenizer from a model folder and names its content. Imports transformers (and torch) when called."""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyhands.config.named_templates import BEGIN_OF_TEXT, TEMPLATES, NamedTemplate
from manyhands.config.schema import ModelSection
from manyhands.config.text import nearest_name
from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.data.chat.tekken import FILE, NAME, is_tekken_only, load_tekken, tekken_template

# Everything in a model folder that can change the ids of a text or the rendering of a conversation.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    FILE,
)
# Vocabularies of older kinds, further templates, and the code of tokenizers that bring their own.
MORE_PATTERNS = ("*.bpe.model", "*.tiktoken", "additional_chat_templates/*.jinja", "*.py")
TOWER_CONFIGS = ("vision_config", "audio_config")
CACHED_WORDS = 1 << 16  # some 200 bytes each
MAX_ID = 10_000_000
LONG_NUMBER = re.compile(rb":\s*\d{8}")
MEDIA_TOKEN = re.compile(r"(?<![a-z])(?:image|img|video|audio|vision|media|speech)s?(?![a-z])", re.IGNORECASE)
MEDIA_TOKEN_KEY = re.compile(r"(?:image|video|audio|vision|media|speech|bo[ia]|eo[ia])\w*_token_(?:id|index)")
# <|im_start|>, <end_of_turn>, [/INST]
MARKER = re.compile(r"<\|[^\s<>|]{1,40}\|>|</?[a-z][a-z_]{0,40}>|\[/?[A-Z][A-Z_]{0,40}\]")


def load_tokenizer(
    model_folder: str | Path,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    new_tokens: Sequence[str] = (),
    special_tokens: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The transformers tokenizer of a folder, with ``chat_template`` (Jinja text, or a path to it) in place of its own.

    ``new_tokens`` are added as special tokens, in this order; one that is a token already keeps its id.
    ``special_tokens`` take the place of the tokenizer's (``{"eos": "<|im_end|>"}``); those that it lacks are added too.
    """
    folder = Path(model_folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            "the model folder has no tokenizer",
            where=str(folder),
            why="none of tokenizer.json, tokenizer_config.json, tokenizer.model, tekken.json is there",
            fix="copy the tokenizer's files into the model folder",
        )
    template = read_chat_template(chat_template, folder)
    tokenizer = load_tekken(folder) if is_tekken_only(folder) else _load_tokenizer(folder, trust_remote_code)
    template = template or (_processor_template(folder) if not tokenizer.chat_template else None)
    if template is not None:
        tokenizer.chat_template = template
    if asked := tokens_to_add(tokenizer, new_tokens, special_tokens):
        _add_tokens(tokenizer, asked)
    if special_tokens:
        _set_special_tokens(tokenizer, special_tokens)
    if BEGIN_OF_TEXT in (tokenizer.chat_template or ""):
        tokenizer.chat_template = tokenizer.chat_template.replace(BEGIN_OF_TEXT, _write_begin(tokenizer))
    if chat_template == NAME:
        _check_named(tokenizer, NAME, tekken_template(folder))
    elif chat_template in TEMPLATES:
        _check_named(tokenizer, str(chat_template), TEMPLATES[str(chat_template)])
    return tokenizer


def _write_begin(tokenizer: Any) -> str:
    """What the tokenizer puts in front of every text, as Jinja text; "" where it puts nothing there."""
    ids, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    num_before = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
    text = "".join(tokenizer.convert_ids_to_tokens(ids[:num_before]))
    return f"{{{{- {json.dumps(text, ensure_ascii=False)} -}}}}" if text else ""


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    check_ids(folder / "tokenizer.json")
    # where mistral-common is installed, transformers would take its own wrapper, which has no character offsets
    plain: dict[str, Any] = {"mistral_format": False} if (folder / FILE).is_file() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, **plain
        )
        tokenizer.encode("a")  # reads what loading has taken as it is, such as the longest text
        return tokenizer
    except Exception as error:  # whatever the files hold: transformers raises many kinds
        raise UserError(
            "the tokenizer cannot be loaded", where=str(folder), why=f"{type(error).__name__}: {error}"
        ) from error


def check_ids(path: Path) -> None:
    """UserError for a token's id that no vocabulary reaches: tokenizers keeps a list of all ids below the highest, some
    GiB of it, and a process that has no room for it ends without an error.
    """
    raw = path.read_bytes() if path.is_file() else b""
    if not LONG_NUMBER.search(raw):
        return  # most files: no need to read them twice
    try:
        fields = parse_json(raw)
        vocabulary = fields["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
        ids += [token["id"] for token in fields.get("added_tokens") or ()]
        highest = max(number for number in ids if isinstance(number, int))
    except (ValueError, LookupError, TypeError, AttributeError):
        return  # reported when it is loaded
    if highest > MAX_ID:
        raise UserError(
            "the tokenizer cannot be loaded",
            where=str(path),
            why=f"a token has the id {highest:,}, and no vocabulary has more than {MAX_ID:,} tokens",
            fix="replace the file by that of the original model",
        )


def open_tokenizer(model_folder: str | Path, model: ModelSection) -> Any:
    """The tokenizer of a folder as the run asks for it."""
    return load_tokenizer(
        model_folder, model.chat_template, model.trust_remote_code, model.new_tokens, model.special_tokens
    )


def tokens_to_add(
    tokenizer: Any, new_tokens: Sequence[str], special_tokens: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """``new_tokens`` and the special tokens that the tokenizer does not know, in this order."""
    known = tokenizer.get_vocab() if special_tokens else {}
    asked = [token for _, token in sorted(special_tokens.items())]  # ids do not depend on the order of the keys
    lacking = [token for token in asked if token not in known and token not in new_tokens]
    return (*new_tokens, *dict.fromkeys(lacking))


def _set_special_tokens(tokenizer: Any, special_tokens: Mapping[str, str]) -> None:
    """UserError where the tokenizer would go on writing its own begin-of-text token in front of texts."""
    before = tokenizer.bos_token_id
    tokenizer.add_special_tokens({f"{name}_token": token for name, token in special_tokens.items()})
    if tokenizer.bos_token_id == before or tokenizer.encode("a")[:1] != [before]:
        return
    if hasattr(tokenizer, "update_post_processor"):
        tokenizer.update_post_processor()
    if tokenizer.encode("a")[:1] != [tokenizer.bos_token_id]:
        raise UserError(
            "the tokenizer writes its own begin-of-text token in front of every text",
            where="model.special_tokens.bos",
            why=f"tokenizer.json names {tokenizer.convert_ids_to_tokens(before)} in its post-processor, "
            "which transformers cannot change to another token",
            fix="leave bos out, or change the post-processor in the model folder's tokenizer.json",
        )


def _check_named(tokenizer: Any, name: str, template: NamedTemplate) -> None:
    """UserError where a template's markers are no tokens: they would be learnt as pieces and end no answer."""
    vocabulary = tokenizer.get_vocab()
    missing = [
        token
        for token in template.tokens
        if token not in vocabulary or len(tokenizer.encode(token, add_special_tokens=False)) != 1
    ]
    if missing:
        raise UserError(
            f"the chat template {name} needs tokens that this tokenizer does not have",
            where=f"model.chat_template: {name}",
            why=f"{', '.join(missing)} would be cut into pieces",
            fix=f"set model.new_tokens: {json.dumps(missing)}, which adds and trains them, or use the template "
            f"alpaca, which needs none",
        )
    if template.needs_end and not tokenizer.eos_token:
        raise UserError(
            f"the chat template {name} ends answers by the tokenizer's end-of-text token, and this one has none",
            where=f"model.chat_template: {name}",
            fix="choose another template, such as chatml",
        )


def _processor_template(folder: Path) -> str | None:
    """The template that older image-text models have beside their tokenizer; transformers' processors alone read it."""
    path = folder / "chat_template.json"
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"] if path.is_file() else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the chat template cannot be read", where=str(path), why=f"{type(error).__name__}: {error}"
        ) from error
    return template if isinstance(template, str) else None


def without_doubled(ids: Sequence[int], added: Sequence[int]) -> slice:
    """Which tokens of a text stay where it begins or ends with the special token that the tokenizer adds there, too.
    ``added``: 1 for each token that the tokenizer has added (``special_tokens_mask``), else 0.
    """
    begin = int(len(ids) > 1 and added[0] and not added[1] and ids[0] == ids[1])
    end = int(len(ids) > 1 and added[-1] and not added[-2] and ids[-1] == ids[-2])
    return slice(begin, len(ids) - end)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """``tokenizer.encode(text)`` with no special token twice where the text has it itself."""
    made = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = made["input_ids"]
    return ids[without_doubled(ids, made["special_tokens_mask"])]


def widen_cache(tokenizer: Any) -> None:
    """Lets a tokenizer cache the ids of more words than the first 10,000; the ids stay."""
    resize = getattr(tokenizer.backend_tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(CACHED_WORDS)


def _add_tokens(tokenizer: Any, new_tokens: Sequence[str]) -> None:
    from tokenizers import AddedToken

    wrong = sorted({token for token in new_tokens if not token.strip() or new_tokens.count(token) > 1})
    if wrong:
        raise UserError(
            "model.new_tokens holds an empty or repeated token",
            where="model.new_tokens",
            details=[repr(t) for t in wrong],
        )
    added = [AddedToken(token, special=True, normalized=False) for token in new_tokens]
    tokenizer.add_special_tokens({"extra_special_tokens": added}, replace_extra_special_tokens=False)
    unknown = [
        token
        for token in new_tokens
        if tokenizer.encode(token, add_special_tokens=False) != [tokenizer.convert_tokens_to_ids(token)]
    ]
    if unknown:
        raise UserError(
            "tokens of model.new_tokens are not read as one token",
            where="model.new_tokens",
            why="another special token is a part of them, or the tokenizer changes them",
            fix="choose other tokens",
            details=unknown,
        )


def note_plain_markers(tokenizer: Any) -> list[str]:
    """A note that names the chat template's markers that are cut into pieces; [] if there are none."""
    if not tokenizer.chat_template:
        return []
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # what a template refuses is reported where rows are rendered
        return []
    markers = [m for m in dict.fromkeys(MARKER.findall(text)) if len(tokenizer.encode(m, add_special_tokens=False)) > 1]
    if not markers:
        return []
    names = ", ".join(markers)
    return [
        f"note: the chat template's markers are no tokens but text to this tokenizer: {names}; model.new_tokens "
        f"makes them tokens"
    ]


def find_placeholders(tokenizer: Any) -> tuple[str, ...]:
    """Tokens for images, videos and sounds of a multimodal model: named in its config.json, or special ones."""
    try:
        config = json.loads((Path(tokenizer.name_or_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    config = config if isinstance(config, dict) else {}
    media = [key for key in config if MEDIA_TOKEN_KEY.fullmatch(key)]
    if not media and not any(key in TOWER_CONFIGS for key in config):
        return ()
    ids = [config[key] for key in media if isinstance(config[key], int)]
    named = [tokenizer.convert_ids_to_tokens(index) for index in ids if 0 <= index < len(tokenizer)]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*filter(None, named), *filter(MEDIA_TOKEN.search, special)]))


def read_chat_template(chat_template: str | None, model_folder: Path) -> str | None:
    """The text of a template that is given as text, by name, or as a path; a text is told by its braces."""
    if chat_template is None or "{" in chat_template:
        return chat_template
    if chat_template == NAME:
        return tekken_template(model_folder).text
    if chat_template in TEMPLATES:
        return TEMPLATES[chat_template].text
    path = Path(chat_template).expanduser()
    if not path.is_file():
        near = nearest_name(path.name, TEMPLATES)
        meant = f"; did you mean {near}?" if near else ""
        fix = f"give a file that exists, Jinja text, or one of the names {', '.join(TEMPLATES)}{meant}"
        raise UserError(f"no such chat template: {chat_template}", where="model.chat_template", fix=fix)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the chat template cannot be read", where=str(path), why=str(error)) from error


def tokenizer_digest(
    model_folder: str | Path,
    chat_template: str | None = None,
    new_tokens: Sequence[str] = (),
    special_tokens: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Hash of all that decides about ids: the tokenizer's files, the template in use, the libraries' versions.

    What a run hands to the template (``data.chat_template_kwargs``, ``data.date``) is the run's, not the tokenizer's.
    """
    folder, digest = Path(model_folder), hashlib.sha256()
    found = [path for pattern in MORE_PATTERNS for path in sorted(folder.glob(pattern))]
    for path in [*(folder / name for name in TOKENIZER_FILES), *found]:
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    digest.update(f"{_read_class_hints(folder)}\0{read_chat_template(chat_template, folder) or ''}".encode())
    digest.update("".join(f"\0{token}" for token in new_tokens).encode())
    if special_tokens:
        digest.update(f"\0\0{json.dumps(sorted(special_tokens.items()))}".encode())
    digest.update(" ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")).encode())
    return digest.hexdigest()


def _read_class_hints(folder: Path) -> str:
    """What transformers takes from config.json to choose a tokenizer's class and to correct it, and what tells
    placeholders (``find_placeholders``)."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    names = ("model_type", "tokenizer_class", "auto_map", "transformers_version")
    if not isinstance(fields, dict):
        return "{}"
    media = {name: value for name, value in fields.items() if MEDIA_TOKEN_KEY.fullmatch(name)}
    towers = [name for name in TOWER_CONFIGS if name in fields]
    return json.dumps({name: fields.get(name) for name in names} | media | {"towers": towers}, sort_keys=True)


CHARACTERS = 4  # of a token
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- elif message.content %}{%- for part in message.content %}{{- part.text or '' }}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES if not name.startswith("chat_template"))


def write_stand_in(model: Path, folder: Path) -> None:
    """Fills ``folder`` with the configuration of ``model`` and the tokenizer. The model's chat template is kept."""
    for path in (*model.glob("*.json"), *model.glob("*.jinja")):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = fields.get("vocab_size") or (fields.get("text_config") or {}).get("vocab_size") or 0
    others = [f"<{number}>" for number in range(len(special), int(size))]  # rows that are tokenized may have any id
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for number, token in enumerate(special)
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": rf"\n|[^\n]{{1,{CHARACTERS}}}"},
            "behavior": "Isolated",
            "invert": False,
        },
        "model": {
            "type": "WordLevel",
            "vocab": {token: n for n, token in enumerate(special + others)},
            "unk_token": "<unk>",
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    config["pad_token"] = "<|im_end|>"
    if not (folder / "chat_template.jinja").is_file():
        config["chat_template"] = _TEMPLATE
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
