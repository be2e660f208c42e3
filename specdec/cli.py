"""The `specdec` command: prompts in, text on standard output, everything else on standard error.

It reaches LLM through the lazy names of `specdec`, so that --help and a bad option answer without loading torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import specdec
from specdec.audit.command import audit
from specdec.bench.command import UsageError, bench, compare
from specdec.bench.settings import DTYPES, KV_DTYPES
from specdec.prompt_file import Message, read_prompts

if TYPE_CHECKING:
    from specdec.output import Handle, Output

# typer brings click or carries its own copy of it, by version; the errors have the same names in both.
_ClickException: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Speculative decoding for Hugging Face language models.",
)
app.command()(audit)
app.command()(bench)
app.command()(compare)


@dataclass(frozen=True)
class Report:
    """How the outputs are shown: pieces as they come, or one JSON document."""

    stream: bool
    json: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 1 for what failed, 2 for bad usage, 130 when interrupted. One line per error."""
    debug = os.environ.get("SPECDEC_DEBUG") == "1"
    try:
        command = typer.main.get_command(app)
        # Not command.main: it turns an interrupt into an exit without a word.
        with command.make_context("specdec", list(sys.argv[1:] if arguments is None else arguments)) as context:
            command.invoke(context)
        sys.exit(0)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except _ClickException as error:
        _complain(error.format_message())
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of standard output has gone; say nothing, and flush nowhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _complain(str(error) or type(error).__name__)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """What comes before a command: the version, or without a command the help."""
    if version:
        print(f"specdec {specdec.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        _quieten()
        return
    raise typer.Exit()


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Alias (smollm2-135m), hub id, folder or .gguf file.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts: text, one a line, or JSON: *.jsonl, *.json.", show_default=False),
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template, or not. Default: if there is one.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="lookup, none, or a model as above.")] = "lookup",
    verifier: Annotated[str, typer.Option(help="coupled, rejection or block.")] = "coupled",
    k: Annotated[str, typer.Option("--k", "-k", help="Drafted tokens per round: auto or a number.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens under this share of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text, whatever is drafted (coupled).")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End at this string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token id; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    min_tokens: Annotated[int | None, typer.Option(help="Tokens to emit before any may end the text.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: fewer tokens of prompt and output.")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="Taken off logits of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time that they are in it.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=NUMBER, added to a token's logit; may be repeated.")
    ] = None,
    allowed_token_id: Annotated[list[int] | None, typer.Option(help="Draw only these; may be repeated.")] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Text not to be written; may be repeated.")] = None,
    json_schema: Annotated[str | None, typer.Option(help="Write JSON that follows this schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="Write what this regular expression matches.")] = None,
    grammar: Annotated[str | None, typer.Option(help="Write what this Lark grammar allows.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, of so many more tokens.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt.")] = None,
    processed_logprobs: Annotated[
        bool, typer.Option("--processed-logprobs", help="Those of what was drawn from, not of the model's logits.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or cuda:1.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (the model's dtype) or fp8.")] = "auto",
    kv_scales: Annotated[
        Path | None, typer.Option(help="For fp8, a file of KVScales.save. Default: calibrated.", show_default=False)
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output at most, in tokens.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Sequences that run at once at most.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    stream: Annotated[bool | None, typer.Option(help="Show text as it comes. Default: for one sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Generate text for prompts, with speculative decoding."""
    requests = _requests(prompt or [], prompts)
    depth = _number_of_drafts(k)
    if dtype not in DTYPES:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv-dtype: expected one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
    params = _usage(
        specdec.SamplingParams,
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n,
        stop=stop, stop_token_ids=stop_token_id or (), ignore_eos=ignore_eos, min_tokens=min_tokens,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or []), allowed_token_ids=allowed_token_id, bad_words=bad_word,
        json_schema=json_schema, regex=regex, grammar=grammar,
        logprobs=logprobs, prompt_logprobs=prompt_logprobs, processed_logprobs=processed_logprobs,
    )  # fmt: skip
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise UsageError("--logprobs and --prompt-logprobs are shown by --json only")
    report = Report(stream=(n == 1 and not as_json) if stream is None else stream, json=as_json)
    if report.stream and (as_json or n > 1):
        raise UsageError("--stream shows one sample per prompt as text; drop it, or --json and --n")
    with specdec.LLM(
        model, drafter=None if drafter == "none" else drafter, verifier=verifier, k=depth, dtype=dtype, device=device,
        kv_dtype=kv_dtype, kv_scales=kv_scales, max_model_len=max_model_len, max_rows=max_rows, revision=revision,
        trust_remote_code=trust_remote_code,
    ) as llm:  # fmt: skip
        if n > 1 and not params.resolve(llm.model.generation_config).noise:
            _say(
                f"note: the {n} samples of a prompt are equal, because decoding is greedy; --temperature makes them differ"
            )
        ready = [_ready(llm, request, chat) for request in requests]
        started = time.perf_counter()
        outputs = _stream(llm, ready, params) if report.stream else _collect(llm, ready, params)
        seconds = time.perf_counter() - started
        setting = {"model": model, "drafter": drafter, "k": llm.k, **_hardware(llm)}
    failed = _show(outputs, seconds, setting, report)
    raise typer.Exit(1 if failed else 0)


def _requests(prompts: list[str], file: Path | None) -> list[str | list[Message]]:
    if file is not None:
        try:
            return [*prompts, *(prompt.content for prompt in read_prompts(file))]
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from error
    if not prompts:
        raise UsageError("no prompt: give PROMPT or --prompts FILE")
    return list(prompts)


def _number_of_drafts(k: str) -> int | str:
    if k == "auto":
        return k
    if not k.isdecimal():
        raise UsageError(f"k: expected auto or a number of at least 0, got {k}")
    return int(k)


def _biases(options: list[str]) -> dict[int, float]:
    biases = {}
    for option in options:
        token, _, value = option.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError as error:
            raise UsageError(f"logit_bias: expected ID=NUMBER, got {option}") from error
    return biases


def _usage(make: Any, **arguments: Any) -> Any:
    """`make(**arguments)`, its complaint about a value being one about the command line."""
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _quieten() -> None:
    """Keep the libraries' chatter off standard error; a long conversion of a model is still announced."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    logger = logging.getLogger("specdec")
    if not any(isinstance(handler, _Announce) for handler in logger.handlers):
        logger.addHandler(_Announce())
        logger.setLevel(logging.INFO)


class _Announce(logging.Handler):
    """Log records as lines of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())


def _ready(llm: Any, request: str | list[Message], chat: bool | None) -> str | list[int]:
    """What LLM takes for `request`: the text itself, or the token ids of a conversation."""
    if isinstance(request, str):
        if chat is False or (chat is None and not getattr(llm.tokenizer, "chat_template", None)):
            return request
        request = [{"role": "user", "content": request}]
    return llm.chat_ids(request)


def _stream(llm: Any, prompts: list[str | list[int]], params: Any) -> list[Output | Exception]:
    """Submit all at once, print each prompt's text as it comes, in order."""
    submitted: list[Handle | Exception] = []
    for prompt in prompts:
        try:
            submitted.append(llm.submit(prompt, params, prompt_index=len(submitted)))
        except (TypeError, ValueError) as error:
            submitted.append(error)
    try:
        return [_print_pieces(handle, len(submitted) > 1, i) for i, handle in enumerate(submitted)]
    finally:
        for handle in submitted:
            if not isinstance(handle, Exception):
                handle.cancel()


def _print_pieces(handle: Handle | Exception, several: bool, index: int) -> Output | Exception:
    if several:
        _heading(index, None)
    if isinstance(handle, Exception):
        return handle
    try:
        for piece in handle:
            print(piece.text, end="", flush=True)
    except (RuntimeError, ValueError) as error:
        return error
    finally:
        print(flush=True)
    return handle.result()


def _collect(llm: Any, prompts: list[str | list[int]], params: Any) -> list[Output | Exception]:
    outputs = llm.generate(prompts, params, progress=sys.stderr.isatty())
    return list(outputs)


def _show(
    outputs: list[Output | Exception], seconds: float, setting: dict[str, Any], report: Report
) -> bool:  # fmt: skip
    """Print what has not been printed, then the figures. Returns whether any output failed."""
    whole = [output for output in outputs if not isinstance(output, Exception)]
    if report.json:
        document = setting | {"outputs": [_plain(output) for output in whole], "totals": _totals(whole, seconds)}
        print(json.dumps(document, ensure_ascii=False, indent=1))
    elif not report.stream:
        for output in whole:
            if len(outputs) > 1:
                _heading(output.prompt_index, output.index)
            print(output.text)
    failures: list[tuple[int, BaseException]] = [(i, o) for i, o in enumerate(outputs) if isinstance(o, Exception)]
    failures += [(o.prompt_index, o.error) for o in whole if o.error is not None]
    for index, error in failures:
        _complain(f"prompt {index + 1}: {error}" if len(outputs) > 1 else str(error))
    if not report.json and len(failures) < len(outputs):
        _say(_figures(_totals(whole, seconds)))
    return bool(failures)


def _totals(outputs: list[Output], seconds: float) -> dict[str, Any]:
    """Sums over all outputs. acceptance_length counts the bonus token; tokens per second include the prompts' time."""
    tokens, rounds = sum(o.stats.num_tokens for o in outputs), sum(o.stats.rounds for o in outputs)
    return {
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "acceptance_length": round(tokens / rounds, 3) if rounds else 0.0,
        "drafted": sum(o.stats.drafted for o in outputs),
        "accepted": sum(o.stats.accepted for o in outputs),
    }


def _plain(output: Output) -> dict[str, Any]:
    """An output as JSON has it: the exception as its message, the clock readings as durations."""
    stats = output.stats
    counts = {name: value for name, value in asdict(stats).items() if not name.endswith("_s")}
    return {
        "prompt_index": output.prompt_index,
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "error": None if output.error is None else str(output.error),
        "prompt_tokens": len(output.prompt_token_ids),
        "logprobs": _plain_logprobs(output.logprobs),
        "prompt_logprobs": _plain_logprobs(output.prompt_logprobs),
        "stats": counts
        | {
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "time_to_first_token_s": stats.time_to_first_token_s,
            "decode_s": stats.decode_s,
        },
    }


def _plain_logprobs(logprobs: Any) -> list[dict[str, Any] | None] | None:
    return None if logprobs is None else [entry and entry._asdict() for entry in logprobs]


def _hardware(llm: Any) -> dict[str, str]:
    dtype = str(llm.model.dtype).removeprefix("torch.")
    return {"dtype": dtype, "kv_dtype": "fp8" if llm.kv_scales else dtype, "device": str(llm.model.device)}


def _figures(totals: dict[str, Any]) -> str:
    return (
        f"{totals['tokens']} tokens in {totals['seconds']:.2f} s, {totals['tokens_per_second']:.1f} tok/s; "
        f"acceptance length {totals['acceptance_length']:.2f} "
        f"({totals['accepted']} of {totals['drafted']} drafts accepted)"
    )


def _heading(prompt_index: int, index: int | None) -> None:
    _say(f"prompt {prompt_index + 1}" + ("" if index is None else f", sample {index + 1}"))


def _complain(message: str) -> None:
    _say(f"error: {' '.join(message.split())}")


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"specdec: {message}", file=sys.stderr, flush=True)
