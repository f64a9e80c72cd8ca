"""Transformers: GPT-2 in four sizes, and BERT in two."""

from __future__ import annotations

from gradwire.lab.planner.tables.network import EMBEDDING, OTHER, Layer
from gradwire.lab.planner.tables.shapes import dense

_GPT2_TOKENS, _GPT2_VOCABULARY = 1024, 50257
_BERT_TOKENS, _BERT_VOCABULARY = 512, 30522


def gpt2() -> list[Layer]:
    """GPT-2 (Radford et al. 2019, table 2), the smallest."""
    return _gpt2(12, 768)


def gpt2_medium() -> list[Layer]:
    """GPT-2 medium (Radford et al. 2019, table 2)."""
    return _gpt2(24, 1024)


def gpt2_large() -> list[Layer]:
    """GPT-2 large (Radford et al. 2019, table 2)."""
    return _gpt2(36, 1280)


def gpt2_xl() -> list[Layer]:
    """GPT-2 xl (Radford et al. 2019, table 2)."""
    return _gpt2(48, 1600)


def bert_base() -> list[Layer]:
    """BERT base (Devlin et al. 2019, sec. 3), with its pooler, without heads."""
    return _bert(12, 768)


def bert_large() -> list[Layer]:
    """BERT large (Devlin et al. 2019, sec. 3), with its pooler, without heads."""
    return _bert(24, 1024)


def _gpt2(depth: int, width: int) -> list[Layer]:
    tokens = _GPT2_TOKENS
    layers = [
        embedding("wte", _GPT2_VOCABULARY, width, tokens, tied=True),
        embedding("wpe", tokens, width, tokens),
    ]
    for index in range(depth):
        name = f"h.{index}"
        layers += [
            _norm(f"{name}.ln_1", width, tokens),
            dense(f"{name}.attn.c_attn", width, 3 * width, tokens),
            _attention(f"{name}.attn", width, tokens),
            dense(f"{name}.attn.c_proj", width, width, tokens),
            _norm(f"{name}.ln_2", width, tokens),
            dense(f"{name}.mlp.c_fc", width, 4 * width, tokens),
            dense(f"{name}.mlp.c_proj", 4 * width, width, tokens),
        ]
    layers.append(_norm("ln_f", width, tokens))
    head = 2.0 * tokens * width * _GPT2_VOCABULARY  # by the weights of wte
    layers.append(
        Layer("lm_head", OTHER, 0, 0, tokens * width, tokens * _GPT2_VOCABULARY, head, tied=True)
    )
    return layers


def _bert(depth: int, width: int) -> list[Layer]:
    tokens = _BERT_TOKENS
    layers = [
        embedding("embeddings.word", _BERT_VOCABULARY, width, tokens),
        embedding("embeddings.position", tokens, width, tokens),
        embedding("embeddings.token_type", 2, width, tokens),
        _norm("embeddings.norm", width, tokens),
    ]
    for index in range(depth):
        name = f"layer.{index}"
        layers += [
            *(dense(f"{name}.attention.{each}", width, width, tokens) for each in "qkv"),
            _attention(f"{name}.attention", width, tokens),
            dense(f"{name}.attention.output", width, width, tokens),
            _norm(f"{name}.attention.norm", width, tokens),
            dense(f"{name}.intermediate", width, 4 * width, tokens),
            dense(f"{name}.output", 4 * width, width, tokens),
            _norm(f"{name}.norm", width, tokens),
        ]
    layers.append(dense("pooler", width, width, 1))
    return layers


def embedding(name: str, rows: int, width: int, read: int, *, tied: bool = False) -> Layer:
    """A table of `rows` vectors, of which one sample reads `read`."""
    weights = rows * width
    return Layer(
        name, EMBEDDING, weights, weights, read, read * width, 0.0, ((rows, width),), read, tied
    )


def _norm(name: str, width: int, tokens: int) -> Layer:
    return Layer(name, OTHER, 0, 2 * width, tokens * width, tokens * width, 0.0)


def _attention(name: str, width: int, tokens: int) -> Layer:
    """Queries times keys, and weights times values: two products without parameters."""
    return Layer(
        name, OTHER, 0, 0, 3 * tokens * width, tokens * width, 4.0 * tokens * tokens * width
    )
