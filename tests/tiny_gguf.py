"""A tiny Llama with a byte-level tokenizer, written as a GGUF file: what the conversion tests read."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 2, 4, 2, 48
SPECIAL = ["<unk>", "<start>", "<end>"]


def write_tiny_gguf(path: Path, seed: int = 0, context: int = 128) -> dict[str, np.ndarray]:
    """Write the file, of a model with `context` positions, and return its fp32 tensors by their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_config(writer, context)
    _write_tokenizer(writer)
    tensors = _tensors(np.random.default_rng(seed))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def alphabet() -> list[str]:
    """The 256 printable stand-ins of bytes that GPT-2's byte-level BPE uses, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


def _write_config(writer: gguf.GGUFWriter, context: int) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(_tokens()))


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = _tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ġ 2", "h i"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}<start>{{ message['content'] }}<end>{% endfor %}")


def _tokens() -> list[str]:
    return [*SPECIAL, *alphabet(), "ĠĠ", "Ġ2", "hi"]


def _tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {"token_embd.weight": matrix(len(_tokens()), HIDDEN), "output_norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    return tensors
