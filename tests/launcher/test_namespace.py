"""The namespace that is derived from a model: the same for the same model, another one for any other."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launcher.harness import run
from xkv_lmcache_autostart.namespace import (
    SAMPLE_BYTES,
    SAMPLES,
    Model,
    ModelError,
    NoModel,
    fingerprint,
    hub_cache,
    model_of,
    samples,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARD_BYTES = 600_000
"""More than 64 samples of 4 KiB."""


def safetensors(seed: int, size: int = SHARD_BYTES) -> bytes:
    """A file with a header and `size` bytes of weights."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(size)


def make_model(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(safetensors(seed + number))
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_hub(cache: Path, name: str, folder: Path) -> Path:
    """A repository in the hub client's cache, as it lays it out; returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(COMMIT)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def namespace(*words: str, **environ: str) -> str:
    model = Model.parse(words, lambda path: Path(path).read_text())
    assert model is not None
    return fingerprint(model, environ).namespace


def test_it_is_the_same_in_another_folder_at_another_time(tmp_path: Path) -> None:
    first = make_model(tmp_path / "a/model")
    second = shutil.copytree(first, tmp_path / "b")
    os.utime(second / "config.json", (1, 1))
    (second / "README.md").write_text("something else")
    assert namespace(str(first)) == namespace(str(second))
    assert namespace(str(first)).startswith("model-")
    assert len(namespace(str(first))) == len("model-") + 32


def change_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float16"}')


def change_a_weight(folder: Path) -> None:
    """Weights of the same name, shape and size."""
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors(99))


def change_a_header(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype": "U8"', b'"dtype": "I8"'))


def change_a_size(folder: Path) -> None:
    with (folder / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"\0" * 5000)


def change_the_last_byte(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def change_names(folder: Path) -> None:
    one, two = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def change_quantization(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [
        change_config,
        change_a_weight,
        change_a_header,
        change_a_size,
        change_the_last_byte,
        change_names,
        change_quantization,
    ],
)
def test_any_change_of_the_files_makes_another(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = make_model(tmp_path / "model")
    before = namespace(str(folder))
    change(folder)
    assert namespace(str(folder)) != before


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "float32"],
        ["--dtype=half"],
        ["--kv-cache-dtype", "fp8"],
        ["--kv_cache_dtype=fp8_e5m2"],
        ["--quantization", "fp8"],
        ["--revision", "other"],
        ["--hf-overrides", '{"a":1}'],
        ["--hf-overrides.a", "1"],
        ["--calculate-kv-scales"],
        ["--load-format", "dummy"],
    ],
)
def test_any_option_that_matters_makes_another(tmp_path: Path, options: list[str]) -> None:
    folder = str(make_model(tmp_path / "model"))
    assert namespace(folder, *options) != namespace(folder)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--port", "1"], []),
        (["--dtype", "auto"], []),
        (["--kv-cache-dtype", "auto"], []),
        (["--load-format", "safetensors"], []),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--dtype", "half"], ["--dtype", "float32", "--dtype=float16"]),
        (["--kv-cache-dtype", "fp8"], ["--kv_cache_dtype=fp8"]),
        (["--kv-cache-dt", "fp8"], ["--kv-cache-dtype", "fp8"]),
        (["--enforce-eager", "-q", "fp8"], ["--quantization", "fp8"]),
        (["--hf-overrides", '{"a":1,"b":2}'], ["--hf-overrides", '{"b": 2, "a": 1}']),
    ],
)
def test_what_means_the_same_is_the_same(tmp_path: Path, one: list[str], other: list[str]) -> None:
    folder = str(make_model(tmp_path / "model"))
    assert namespace(folder, *one) == namespace(folder, *other)
    assert namespace("--model", folder, *one) == namespace(folder, *other)


def test_a_config_file_of_vllm_counts_behind_the_arguments(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    file = tmp_path / "vllm.yaml"
    file.write_text(f"model: {folder}\ndtype: float16\nkv_cache_dtype: 'fp8'  # small\nport: 80\n")
    config = ["--config", str(file)]
    assert namespace(*config) == namespace(folder, "--dtype", "float16", "--kv-cache-dtype", "fp8")
    assert namespace(*config, "--dtype", "float32") == namespace(
        folder, "--dtype", "float32", "--kv-cache-dtype", "fp8"
    )


def test_files_that_vllm_does_not_load_do_not_count(tmp_path: Path) -> None:
    """Nodes that fetched a repository whole and nodes that fetched what vLLM needs share."""
    folder = make_model(tmp_path / "model")
    before = namespace(str(folder))
    (folder / "consolidated.safetensors").write_bytes(safetensors(5))
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "original").mkdir()
    (folder / "original/consolidated.00.pth").write_bytes(b"x" * 1000)
    assert namespace(str(folder)) == before


def test_code_that_the_model_brings_counts(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "modeling.py").write_text("a = 1")
    plain = namespace(str(folder))
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.M"}}')
    before = namespace(str(folder))
    (folder / "modeling.py").write_text("a = 2")
    assert len({plain, before, namespace(str(folder))}) == 3


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(b"GGUF" + b"1" * 400_000)
    shutil.copyfile(one, two)
    assert namespace(str(one)) != namespace(str(two)), "the name of a file counts"
    before = namespace(str(one))
    one.write_bytes(b"GGUF" + b"2" * 400_000)
    assert namespace(str(one)) != before


def test_a_repository_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    for cache in ("a/hub", "b"):
        make_hub(tmp_path / cache, "org/model", folder)
    by_home = namespace("org/model", HF_HOME=str(tmp_path / "a"))
    assert by_home == namespace("org/model", HF_HUB_CACHE=str(tmp_path / "b"))
    assert by_home == namespace("org/model", "--revision", "main", HF_HUB_CACHE=str(tmp_path / "b"))
    assert by_home == namespace("org/model", "--revision", COMMIT, HF_HUB_CACHE=str(tmp_path / "b"))


def test_the_hubs_hash_stands_for_a_file_which_is_not_read(tmp_path: Path) -> None:
    snapshot = make_hub(tmp_path, "org/model", make_model(tmp_path / "model"))
    before = namespace("org/model", HF_HUB_CACHE=str(tmp_path))
    link = snapshot / "model-00001-of-00002.safetensors"
    blob = link.resolve()
    blob.write_bytes(b"\xff" * blob.stat().st_size)  # no header that could be read
    assert namespace("org/model", HF_HUB_CACHE=str(tmp_path)) == before
    other = blob.with_name("f" * 64)
    blob.rename(other)
    link.unlink()
    link.symlink_to(other)
    assert namespace("org/model", HF_HUB_CACHE=str(tmp_path)) != before


def test_another_revision_is_another_namespace(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    make_hub(tmp_path, "org/model", folder)
    main = namespace("org/model", HF_HUB_CACHE=str(tmp_path))
    repository = tmp_path / "models--org--model"
    shutil.copytree(repository / "snapshots" / COMMIT, repository / "snapshots" / ("f" * 40), symlinks=True)
    (repository / "refs/v2").write_text("f" * 40)
    assert namespace("org/model", "--revision", "v2", HF_HUB_CACHE=str(tmp_path)) != main


def test_weights_in_a_download_folder_have_their_config_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    make_hub(tmp_path / "hub", "org/model", folder)
    snapshot = make_hub(tmp_path / "dir", "org/model", folder)
    (snapshot / "config.json").unlink()
    found = namespace(
        "org/model", "--download-dir", str(tmp_path / "dir"), HF_HUB_CACHE=str(tmp_path / "hub")
    )
    assert found == namespace("org/model", HF_HUB_CACHE=str(tmp_path / "hub"))


def test_the_folders_of_the_hubs_client() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert hub_cache({"HF_HOME": "/h"}) == Path("/h/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_cache({"HOME": "/root"}) == Path("/root/.cache/huggingface/hub")


def missing_folder(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "none")]


def missing_repository(tmp_path: Path) -> list[str]:
    return ["org/none", "--download-dir", str(tmp_path)]


def missing_revision(tmp_path: Path) -> list[str]:
    make_hub(tmp_path, "org/model", make_model(tmp_path / "model"))
    return ["org/model", "--revision", "v3", "--download-dir", str(tmp_path)]


def missing_config(tmp_path: Path) -> list[str]:
    folder = make_model(tmp_path / "model")
    (folder / "config.json").unlink()
    return [str(folder)]


def missing_weights(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    return [str(tmp_path)]


def missing_shard(tmp_path: Path) -> list[str]:
    folder = make_model(tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    return [str(folder)]


def torn_shard(tmp_path: Path) -> list[str]:
    folder = make_model(tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 100)
    return [str(folder)]


def object_storage(_: Path) -> list[str]:
    return ["s3://bucket/model"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing_folder, "is neither a folder nor a file here nor the name of a repository"),
        (missing_repository, "the model 'org/none' is not in"),
        (missing_revision, "revision 'v3' of the model 'org/model' is not in"),
        (missing_config, "has no config.json; complete the model"),
        (missing_weights, "has no weight files"),
        (missing_shard, "lacks model-00002-of-00002.safetensors (1 of 2 weight files)"),
        (torn_shard, "is no whole safetensors file; fetch it again"),
        (object_storage, "is neither a folder nor a file here"),
    ],
)
def test_a_model_that_is_not_all_there(
    tmp_path: Path, make: Callable[[Path], list[str]], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        namespace(*make(tmp_path))
    assert message in str(caught.value)
    assert "write a name of your own in place of auto" in str(caught.value)


def test_the_command_says_which_model_before_the_setting() -> None:
    def read(_: str) -> str:
        return ""

    assert model_of(["a"], "b", read).name == "a"
    assert model_of(None, "b", read).name == "b"
    assert model_of(None, "/a b/c", read).name == "/a b/c"
    assert model_of(None, "b --dtype half --revision 'r 1'", read).revision == "r 1"
    assert model_of(None, "b --dtype half", read) == model_of(["b", "--dtype", "half"], None, read)
    for words, text in (
        (None, None),
        ([], None),
        (["--port", "80"], None),
        (None, "--dtype half"),
        (None, "b -q '"),
    ):
        with pytest.raises(NoModel):
            model_of(words, text, read)


def test_samples_are_spread_over_the_file() -> None:
    assert samples(0) == []
    assert samples(100) == [(0, 100)]
    assert samples(SAMPLES * SAMPLE_BYTES) == [(0, SAMPLES * SAMPLE_BYTES)]
    for size in (SAMPLES * SAMPLE_BYTES + 1, 5 * 10**9 + 3):
        found = samples(size)
        assert len(found) == SAMPLES
        assert found[0] == (0, SAMPLE_BYTES)
        assert sum(found[-1]) == size
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(found)]
        assert max(gaps) <= size / (SAMPLES - 1) + SAMPLE_BYTES


def test_a_hundred_files_that_are_in_no_cache_take_less_than_a_second(tmp_path: Path) -> None:
    """Sparse files of 4 GiB with real content at the places that are read, written out and dropped from the cache."""
    size = 4 * 2**30
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({f"w{number}": {"dtype": "F16"} for number in range(1000)}).encode()
    for number in range(100):
        source = random.Random(number)
        with (tmp_path / f"model-{number:05}.safetensors").open("wb") as file:
            file.truncate(size)
            for offset, length in samples(size):
                os.pwrite(file.fileno(), source.randbytes(length), offset)
            os.pwrite(file.fileno(), len(header).to_bytes(8, "little") + header, 0)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    found = fingerprint(model_of([str(tmp_path)], None, lambda _: ""), {})
    seconds = time.perf_counter() - begun
    print(f"fingerprint of 100 files: {seconds * 1000:.0f} ms")
    assert found.files == 100
    assert seconds < 1.0


def test_the_launcher_derives_it(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    wanted = namespace(folder, "--dtype", "half")
    for values in (
        {"LMC_XKV_NAMESPACE": "auto", "LMC_MODEL": f"{folder} --dtype half"},
        {"LMC_XKV_PARAMS": '{"namespace":"auto"}', "LMC_MODEL": f"{folder} --dtype half"},
    ):
        done = run("--print", "l2-adapter", **values)
        assert json.loads(done.stdout)["adapter_params"] == {"namespace": wanted}
        assert "the namespace is derived from the model" in done.stderr
    done = run(
        *("--dry-run", "--", "vllm", "serve", folder, "--dtype=half"),
        LMC_ENABLE="1",
        LMC_XKV_NAMESPACE="auto",
    )
    assert f'"namespace":"{wanted}"' in done.stdout


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({}, 2, "needs to know the model: write it right after `vllm serve`"),
        ({"LMC_MODEL": "/no/such"}, 1, "the model '/no/such' is neither a folder nor a file here"),
        ({"LMC_MODEL": "--dtype half"}, 2, "does not begin with a model"),
    ],
)
def test_the_launcher_says_why_it_cannot(values: dict[str, str], code: int, message: str) -> None:
    done = run("--exec", LMC_XKV_NAMESPACE="auto", **values)
    assert done.returncode == code
    assert message in done.stderr
    assert "nothing was started" in done.stderr
