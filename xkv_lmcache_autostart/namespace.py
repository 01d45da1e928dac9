"""`LMC_XKV_NAMESPACE=auto`: a namespace from the model that vLLM will load.

LMCache's keys know a model by its name alone. This fingerprint is of what decides its KV cache: the config, the flags
that change dtype or layout, the revision, and every weight file. It reads 64 blocks of 4 KiB of each file, not all of
it, so that it takes no second; it never reaches for the network. The model's name and folder are no part of it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xkv_lmcache import grammar
from xkv_lmcache_autostart.settings import arguments

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096

_VERSION: Final = "xkv-namespace-1"
_DIGEST_BYTES: Final = 16
_MAX_HEADER_BYTES: Final = 100 * 10**6
"""The longest header that safetensors itself reads."""

_READERS: Final = 16
_CURE: Final = "or write a name of your own in place of auto"

_CONFIGS: Final = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
)
"""What vLLM may read a model's shape and quantization from."""

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Weight files: vLLM loads those of the first kind that is there."""

_WEIGHTS_BY_FORMAT: Final = {
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "gguf": ("*.gguf",),
}
"""The same where `--load-format` chooses."""

_INDEX: Final = {"*.safetensors": "model.safetensors.index.json", "*.bin": "pytorch_model.bin.index.json"}
"""The list of the weight files of a kind, where the model has one: other files of the kind are not loaded."""

_IDENTITY: Final = {
    "--dtype": "auto",
    "--kv-cache-dtype": "auto",
    "--quantization": "",
    "--hf-overrides": "",
    "--calculate-kv-scales": "",
}
"""vLLM's options that change what is in the KV cache, with what leaving them out means."""

_OPTIONS: Final = (
    *_IDENTITY,
    "--model",
    "--revision",
    "--download-dir",
    "--load-format",
    "--hf-config-path",
    "--config",
)
_SAME_DTYPE: Final = {"half": "float16", "float": "float32"}
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class ModelError(Exception):
    """The model's files are not there or cannot be read; the text says why and what to do."""


class NoModel(ModelError):
    """Nothing says which model it is."""


@dataclass(frozen=True)
class Model:
    """A model as vLLM's arguments describe it."""

    name: str
    """A folder, a file or the name of a repository on the hub."""
    revision: str | None
    download_dir: str | None
    load_format: str
    config_path: str | None
    """Where the config is instead, as `name`."""
    identity: tuple[tuple[str, str], ...]
    """The options that change what is in the KV cache, in one spelling and order."""

    @classmethod
    def parse(cls, words: Sequence[str], read: Callable[[str], str]) -> Model | None:
        """Read the arguments after `vllm serve`; None where they do not plainly say which model.

        `read` returns the text of a file that `--config` names; what is in there goes behind the arguments.
        Raises `ModelError` for a config file that is no YAML.
        """
        given = _options(words)
        files = [value for name, value in given if name == "--config" and value]
        given = [option for file in files for option in _of_config(file, read(file))] + given
        last = {name: value for name, value in given}
        first = words[0] if words and not words[0].startswith("-") else None
        model = first or last.get("--model")
        if not model:
            return None
        identity = {**_IDENTITY, **{name: value for name, value in given if _base(name) in _IDENTITY}}
        identity["--dtype"] = _SAME_DTYPE.get(identity["--dtype"], identity["--dtype"])
        return cls(
            name=model,
            revision=last.get("--revision") or None,
            download_dir=last.get("--download-dir") or None,
            load_format=last.get("--load-format") or "auto",
            config_path=last.get("--hf-config-path") or None,
            identity=tuple(sorted((name, _canonical_json(value)) for name, value in identity.items())),
        )


def model_of(words: Sequence[str] | None, text: str | None, read: Callable[[str], str]) -> Model:
    """The model of a vLLM command with the arguments `words`, else that of `LMC_MODEL`, which has the text `text`.

    Raises `NoModel` where neither says which it is.
    """
    if words is not None and (model := Model.parse(words, read)):
        return model
    if text is not None:
        try:
            given = grammar.shell_words(text) if " -" in text else [text]
        except ValueError as error:
            raise NoModel(f"LMC_MODEL={text!r} {error}") from None
        if model := Model.parse(given, read):
            return model
        raise NoModel(f"LMC_MODEL={text!r} does not begin with a model; write it first, then its options")
    raise NoModel(
        "LMC_XKV_NAMESPACE='auto' needs to know the model: write it right after `vllm serve` or with --model, or "
        "set LMC_MODEL"
    )


@dataclass(frozen=True)
class Fingerprint:
    """A namespace and what it was derived from."""

    namespace: str
    folder: str
    """Where the model's files are."""
    files: int
    """The number of weight files."""


def fingerprint(model: Model, environ: Mapping[str, str]) -> Fingerprint:
    """The namespace of `model`, whose files must be on this machine.

    The same for the same files and options on every node. Raises `ModelError` where files are missing.
    """
    source = _locate(model.name, model.revision, environ, model.download_dir)
    weights = [] if model.load_format == "dummy" else _weights(source, model)
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(*fields: str | bytes) -> None:
        for field in fields:
            data = os.fsencode(field) if isinstance(field, str) else field
            total.update(len(data).to_bytes(8, "little") + data)

    add(_VERSION, source.revision, "dummy" if model.load_format == "dummy" else "")
    for name, value in model.identity:
        add(name, value)
    for path in _configs(source, model, environ):
        add(path.name, _read(path))
    with ThreadPoolExecutor(_READERS) as readers:
        for path, digest in zip(weights, readers.map(_weight_digest, weights), strict=True):
            add(path.name, digest)
    return Fingerprint(f"model-{total.hexdigest()}", str(source.folder), len(weights))


@dataclass(frozen=True)
class _Source:
    """A model's files: a folder of them, or one file."""

    folder: Path
    file: Path | None
    revision: str
    """The hub's commit; for a folder what `--revision` says."""
    from_hub: bool


def _locate(name: str, revision: str | None, environ: Mapping[str, str], download_dir: str | None) -> _Source:
    path = Path(name)
    if path.is_dir():
        return _Source(path, None, revision or "", from_hub=False)
    if path.is_file():
        return _Source(path.parent, path, revision or "", from_hub=False)
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise ModelError(
            f"the model {name!r} is neither a folder nor a file here nor the name of a repository on the hub; "
            f"correct it, {_CURE}"
        )
    cache = Path(download_dir) if download_dir else hub_cache(environ)
    folder = cache / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    commit = wanted if (folder / "snapshots" / wanted).is_dir() else ""
    if not commit:
        try:
            commit = (folder / "refs" / wanted).read_text().strip()
        except OSError:
            pass
    snapshot = folder / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        which = f"revision {revision!r} of the model {name!r}" if revision else f"the model {name!r}"
        raise ModelError(
            f"{which} is not in {cache}; fetch it before the start (hf download {name}), name its folder, {_CURE}"
        )
    return _Source(snapshot, None, commit, from_hub=True)


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder in which the hub's client keeps repositories."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or Path.home(), ".cache")
    return Path(base).expanduser() / "huggingface/hub"


def _configs(source: _Source, model: Model, environ: Mapping[str, str]) -> list[Path]:
    """The config files, in one order. The hub's commit stands for all but the first."""
    if model.config_path is not None:
        source = _locate(model.config_path, model.revision, environ, None)
    elif source.file is not None:
        return []  # GGUF brings its config
    places = [source.folder]
    if source.from_hub and model.download_dir and model.config_path is None:
        # vLLM keeps the weights in --download-dir, and the config in the hub's cache all the same.
        places.append(hub_cache(environ) / source.folder.relative_to(model.download_dir))
    found = [path for place in places for name in _CONFIGS if (path := place / name).is_file()]
    if source.file is not None:
        found = [source.file]
    if not found:
        raise ModelError(f"{places[-1]} has no config.json; complete the model there, {_CURE}")
    if source.from_hub:
        return found[:1]
    if b'"auto_map"' in _read(found[0]):
        found += sorted(source.folder.glob("*.py"))
    return found


def _weights(source: _Source, model: Model) -> list[Path]:
    """The files that vLLM will load, by name."""
    if source.file is not None:
        return [source.file]
    patterns = _WEIGHTS_BY_FORMAT.get(model.load_format, _WEIGHTS)
    for pattern in patterns:
        found = {path.name: path for path in source.folder.glob(pattern)}
        if not found:
            continue
        if pattern in _INDEX and (index := source.folder / _INDEX[pattern]).is_file():
            wanted = _shards(index)
            if missing := sorted(wanted - found.keys()):
                raise ModelError(
                    f"{source.folder} lacks {missing[0]} ({len(missing)} of {len(wanted)} weight files); "
                    f"complete the model there, {_CURE}"
                )
            found = {name: path for name, path in found.items() if name in wanted}
        return [found[name] for name in sorted(found)]
    raise ModelError(
        f"{source.folder} has no weight files ({', '.join(patterns)}); complete the model there, {_CURE}"
    )


def _shards(index: Path) -> set[str]:
    """The files that an index of weights names."""
    try:
        return set(json.loads(_read(index))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is no index of weights; complete the model there, {_CURE}") from None


def _weight_digest(path: Path) -> bytes:
    """What stands for a weight file: the hub's hash of it, or its size, header and samples."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        if blob := _blob(path):
            digest.update(f"blob {path.stat().st_size} {blob}".encode())
            return digest.digest()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            # Reading ahead would read thirty times what is wanted.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            digest.update(f"file {size} ".encode())
            if path.suffix == ".safetensors":
                digest.update(_header(path, descriptor, size))
            for offset, length in samples(size):
                digest.update(os.pread(descriptor, length, offset))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; allow it, {_CURE}") from None
    return digest.digest()


def _blob(path: Path) -> str | None:
    """The hub's hash of a file in its cache, which names the blob that the file is a link to."""
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    return target.name if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) else None


def _header(path: Path, descriptor: int, size: int) -> bytes:
    """The header of a safetensors file: its length as 8 bytes, little endian, and that much JSON."""
    length = os.pread(descriptor, 8, 0)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelError(f"{path} is no whole safetensors file; fetch it again, {_CURE}")
    return length + os.pread(descriptor, count, 8)


def samples(size: int) -> list[tuple[int, int]]:
    """The places and lengths of what is read of a file of `size` bytes: all of a small one, else 64 blocks.

    They lie at even distances, the first at the beginning, the last at the very end.
    """
    if size <= SAMPLES * SAMPLE_BYTES:
        return [(0, size)] if size else []
    blocks = size // SAMPLE_BYTES
    places = [at * (blocks - 1) // (SAMPLES - 1) * SAMPLE_BYTES for at in range(SAMPLES - 1)]
    return [(place, SAMPLE_BYTES) for place in (*places, size - SAMPLE_BYTES)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; allow it, {_CURE}") from None


def _options(words: Iterable[str]) -> list[tuple[str, str]]:
    """The options of interest, by their full names; a flag has the value "true"."""
    spelled = ["--quantization" if word == "-q" else word for word in words]
    found = []
    for name, value in arguments(spelled):
        if full := _full_name(name.replace("_", "-")):
            found.append((full, "true" if value is None else value))
    return found


def _full_name(name: str) -> str | None:
    """The option of interest that `name` stands for: vLLM takes abbreviations, and dotted names for JSON."""
    base, dot, rest = name.partition(".")
    if base in _OPTIONS:
        return name
    full = [option for option in _OPTIONS if len(base) > len("--") and option.startswith(base)]
    return f"{full[0]}{dot}{rest}" if len(full) == 1 else None


def _base(name: str) -> str:
    return name.partition(".")[0]


def _of_config(path: str, text: str) -> list[tuple[str, str]]:
    """The options in a vLLM config file."""
    yaml = importlib.import_module("yaml")
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        raise ModelError(
            f"{path} is no YAML, so that the model cannot be told; correct it, {_CURE}"
        ) from None
    if not isinstance(values, dict):
        return []
    words = []
    for key, value in values.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not None and value is not False:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words.append(f"--{key}={text}")
    return _options(words)


def _canonical_json(text: str) -> str:
    """JSON in one spelling, other text as it is."""
    if not text.startswith("{"):
        return text
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text
