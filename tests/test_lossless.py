"""Speculation cannot change the output: every engine run below is compared with plain decoding, token for token, in fp32.

Identity, never length. Kinds of drafters: none, look-up, a copy of the target, a near copy, a random model, and
drafters that are always right and always wrong.
"""

import random

import pytest
from support import (
    DRAFTERS,
    VOCAB,
    Request,
    assert_plain,
    assert_plain_until_cancelled,
    disturbed_step,
    engine,
    finish,
    params,
    run,
    submit,
)

_rng = random.Random(0)
PROMPTS = [
    [5],
    [7, 8, 9, 10],  # ends at a block's edge
    [11, 3, 4, 60, 61],
    [_rng.randrange(VOCAB) for _ in range(8)],
    [4, 9, 4, 9, 4, 9, 4, 9, 4],
    [_rng.randrange(VOCAB) for _ in range(17)],
    [1, 2, 3] * 7,
    [20] * 12,
]


def requests(k=None, temperature=None, name="llama", new=18, **kwargs):
    """One request per prompt; `k` and `temperature` None: mixed within the batch."""
    each = []
    for i, prompt in enumerate(PROMPTS):
        p = params(
            temperature=float(i % 2) if temperature is None else temperature,
            seed=1234567 * i,
            k=i % 6 if k is None else k,
        )
        each.append(Request(prompt, new, p, name=name, **kwargs))
    return each


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_for_every_drafter_and_k(drafter, k, temperature):
    e = engine(drafter=drafter, k=k, lag=k % 2)
    run(e, requests(k, temperature))
    if drafter in ("same", "right") and k:
        assert e.stats.accepted == e.stats.drafted > 0
    if drafter == "wrong" and k:
        assert e.stats.accepted == 0 < e.stats.drafted


@pytest.mark.parametrize("drafter", ["none", "lookup", "same"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gpt2"])
def test_same_tokens_for_every_architecture(name, k, drafter):
    run(engine(name, drafter, k=k, lag=1), requests(k, 0.0, name))


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["lookup", "near", "same", "right"])
def test_mixed_k_and_temperature_in_a_batch(drafter, lag):
    run(engine(drafter=drafter, k=5, lag=lag), requests())


@pytest.mark.parametrize("budget", [1, 3, 100])
@pytest.mark.parametrize("drafter", ["none", "near"])
def test_prompts_in_chunks(drafter, budget):
    run(engine(drafter=drafter, budget=budget, lag=1), requests())


@pytest.mark.parametrize("blocks", [10, 14, 19])
@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "same", "right"])
def test_preemption_by_a_tiny_pool(drafter, blocks):
    e = engine(drafter=drafter, blocks=blocks, lag=1)
    run(e, requests(4))
    assert blocks > 14 or e.scheduler.preemptions > 0


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "same", "right"])
def test_end_token_at_every_offset_of_a_block(drafter, at):
    e = engine(drafter=drafter, k=5, lag=at % 2)
    each = []
    for i, prompt in enumerate(PROMPTS):
        p = params(float(i % 2), seed=i, k=5)
        each.append(Request(prompt, 18, p, eos=(Request(prompt, 18, p).full[len(prompt) + at - 1],)))
    run(e, each)
    assert all(r.seq.finish_reason == "stop" for r in each)


@pytest.mark.parametrize("new", range(1, 9))
@pytest.mark.parametrize("drafter", ["none", "near", "same", "right"])
def test_every_number_of_tokens(drafter, new):
    each = run(engine(drafter=drafter, k=5, lag=new % 2), requests(5, new=new))
    assert all(r.seq.finish_reason == "length" for r in each)


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["lookup", "same", "right"])
def test_up_to_the_last_position(drafter, block_size):
    """Outputs that end at the row's last position, with blocks that divide it and that don't."""
    e = engine(drafter=drafter, k=5, max_len=24, block_size=block_size, blocks=128)
    each = [Request(p, 60, params(k=5), max_len=24) for p in PROMPTS]
    run(e, each)
    assert all(len(r.seq) == 24 for r in each)


@pytest.mark.parametrize("drafter", ["none", "near", "same"])
def test_samples_of_one_prompt_share_it(drafter):
    """n samples fork the prompt's KV: each equals the sample decoded alone, and the first is the single request's."""
    p = params(1.0, seed=3, n=4, k=3)
    each = [Request(PROMPTS[5], 12, p, index=i) for i in range(4)]
    for r in each[1:]:
        r.seq.parent = each[0].seq
    e = engine(drafter=drafter, k=3, lag=1)
    run(e, each)
    assert len({tuple(r.seq.token_ids) for r in each}) == 4
    assert all(r.seq.stats.cached_tokens == len(PROMPTS[5]) - 1 for r in each[1:])
    assert e.stats.prompt_tokens == len(PROMPTS[5]) - 1


def test_prefix_served_without_a_drafter_then_twice_with_one():
    """Invariant 4: the shared blocks are filled for the drafter once, and acceptance is as when cold."""
    prompt = PROMPTS[5]
    e = engine(drafter="same", k=4)
    cold = run(e, [Request(prompt, p=params(k=4))])[0].seq.stats
    e = engine(drafter="same", k=4)
    run(e, [Request(prompt, p=params(k=0))])
    assert e.stats.drafter_tokens == 0
    before = e.stats.prompt_tokens
    both = run(e, [Request(prompt, p=params(k=4)), Request(prompt, p=params(k=4))])
    assert e.stats.prompt_tokens == before == 16
    assert e.stats.drafter_tokens == 16
    for r in both:
        assert r.seq.stats.cached_tokens == 16
        assert r.seq.stats.accepted_per_round == cold.accepted_per_round


def test_prompts_with_one_beginning_wait_for_the_first():
    """Submitted at once, a long shared beginning is extended once."""
    shared = [_rng.randrange(VOCAB) for _ in range(40)]
    e = engine(budget=7, blocks=64)
    run(e, [Request(shared + [i, i + 1], 6) for i in range(4)])
    assert e.stats.prompt_tokens == 41 + 3 * 1


@pytest.mark.parametrize("when", range(1, 9))
def test_cancel_with_a_round_in_flight(when):
    """What a cancelled sequence emitted is dropped, and nothing bad of it is found by later prompts."""
    e = engine(drafter="same", k=4, budget=6, lag=1)
    each = submit(e, requests(4))
    for _ in range(when):
        e.step()
    for i in (1, 3, 5):
        e.cancel(each[i].seq)
    finish(e)
    for i, r in enumerate(each):
        if i in (1, 3, 5) and r.seq.finish_reason == "cancelled":
            assert r.seq.token_ids == r.full[: len(r.seq)]
        else:
            assert_plain(r)
    run(e, requests(4))


def test_requests_join_and_leave_at_random():
    """Random mixes of joining, cancelling, preempting and pool sizes, 12 seeds."""
    for seed in range(12):
        rng = random.Random(seed)
        kind = rng.choice(DRAFTERS)
        e = engine(drafter=kind, k=4, blocks=rng.choice([16, 30, 64]), budget=rng.choice([2, 7, 30]), lag=seed % 3)
        each: list[Request] = []
        for _ in range(60):
            if rng.random() < 0.35:
                prompt = rng.choice(PROMPTS)
                prompt = prompt[: rng.randint(1, len(prompt))]
                p = params(float(rng.random() < 0.5), seed=rng.randint(0, 2), k=rng.randint(0, 4))
                each += submit(e, [Request(prompt, rng.randint(1, 18), p)])
            disturbed_step(e, rng, 0.05)
        finish(e)
        for r in each:
            assert_plain_until_cancelled(r)


@pytest.mark.parametrize("tokens", [4, 5, 7, 10, 24])
@pytest.mark.parametrize("drafter", ["lookup", "near", "same", "right"])
def test_small_token_bucket(drafter, tokens):
    """The bucket of a captured round: fewer tokens than wanted drafts, or more. Granted drafts are still exact."""
    e = engine(drafter=drafter, k=5)
    shape_of = e._shape

    def bucketed(group):
        shape = shape_of(group)
        return type(shape)(shape.draft_steps, max(tokens, len(group.seqs)), shape.noise, shape.filters)

    e._shape = bucketed
    run(e, requests(5))
    if drafter in ("same", "right"):
        assert e.stats.accepted == e.stats.drafted
