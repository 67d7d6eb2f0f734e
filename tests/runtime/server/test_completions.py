"""Completions with the official client: field by field, and equal to offline runs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dovetail.runtime.app import App
from dovetail.runtime.schedule.request import Score
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, SAMPLED, answer, chat_ids


def test_completion_equals_the_offline_run(client: openai.OpenAI, offline: App) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12)
    assert reply.choices[0].text == answer(offline, PROMPT, max_tokens=12)
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_a_completion_has_16_tokens_at_most(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert reply.usage is not None and reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["texts", "ids", "lists"])
def test_prompts_come_in_three_more_forms(client: openai.OpenAI, offline: App, kind: str) -> None:
    assert offline.tokenizer is not None
    texts = [PROMPT, "Question: Where is Melkar?\nPassage:"]
    ids = [offline.tokenizer.encode(text) for text in texts]
    prompt: Any = {"texts": texts, "ids": ids[0], "lists": ids}[kind]
    reply = client.completions.create(model="llama", prompt=prompt, max_tokens=6)
    wanted = [answer(offline, text, max_tokens=6) for text in texts]
    assert [choice.text for choice in reply.choices] == wanted[: len(reply.choices)]
    assert len(reply.choices) == (1 if kind == "ids" else 2)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, ids[: len(reply.choices)]))


def test_choices_of_several_prompts_are_numbered_by_prompt(
    client: openai.OpenAI, offline: App
) -> None:
    prompts = [PROMPT, "Question:"]
    reply = client.completions.create(model="llama", prompt=prompts, n=2, **SAMPLED)
    found = offline.generate(prompts, n=2, **SAMPLED)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [c.text for c in reply.choices] == [c.text for c in found]


def test_echo_puts_the_prompt_first(client: openai.OpenAI, offline: App) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=4, echo=True)
    assert reply.choices[0].text == PROMPT + answer(offline, PROMPT, max_tokens=4)
    stream = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=4, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text


def test_echo_alone_generates_nothing(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=0, echo=True)
    assert reply.choices[0].text == PROMPT and reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 0


def scored(offline: App, prompt: list[int], top: int = 0) -> Score:
    (found,) = offline.score(prompt, top=top)
    return found


@pytest.mark.parametrize("answer_tokens", [0, 1, 5])
@pytest.mark.parametrize("kind", ["texts", "ids", "lists"])
def test_echo_with_logprobs_scores_the_prompt(
    client: openai.OpenAI, offline: App, kind: str, answer_tokens: int
) -> None:
    assert offline.tokenizer is not None
    texts = [PROMPT, "Question: Where is Melkar?\nPassage:"]
    ids = [offline.tokenizer.encode(text) for text in texts]
    prompt: Any = {"texts": texts, "ids": ids[0], "lists": ids}[kind]
    asked = {"max_tokens": answer_tokens, "echo": True, "logprobs": 2}
    reply = client.completions.create(model="llama", prompt=prompt, **asked)
    assert len(reply.choices) == (1 if kind == "ids" else 2)
    for choice, prompt_ids, text in zip(reply.choices, ids, texts, strict=False):
        wanted, lists = scored(offline, prompt_ids, 2), choice.logprobs
        assert lists is not None and lists.token_logprobs is not None and lists.tokens is not None
        length = len(prompt_ids)
        assert tuple(lists.token_logprobs[:length]) == wanted.logprobs
        assert len(lists.tokens) == len(lists.token_logprobs) == length + answer_tokens
        assert lists.top_logprobs is not None and lists.text_offset is not None
        for place, top in enumerate(wanted.top[1:], 1):  # the token itself, too, as at OpenAI
            spelled = {offline.tokenizer.spell(token).decode() for token, _ in top}
            assert set(lists.top_logprobs[place] or ()) == spelled | {lists.tokens[place]}
        for chosen, best in zip(lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True):
            assert chosen <= max(best.values()) + 1e-4
        assert choice.text[lists.text_offset[2] :].startswith(lists.tokens[2])
        assert choice.text.startswith(text)
        assert [*lists.text_offset, len(choice.text)][length] == len(text)
    assert reply.usage is not None and reply.usage.completion_tokens <= 2 * answer_tokens


def test_an_echoed_answer_has_a_logprob_for_its_end_token(
    client: openai.OpenAI, offline: App
) -> None:
    (whole,) = offline.generate(PROMPT, max_tokens=40)
    assert whole.finish_reason == "stop" and offline.tokenizer is not None
    prompt = [*offline.tokenizer.encode(PROMPT), *whole.token_ids[:-1]]
    asked = {"max_tokens": 1, "echo": True, "logprobs": 1}  # as lm-evaluation-harness asks
    (choice,) = client.completions.create(model="llama", prompt=prompt, **asked).choices
    assert choice.finish_reason == "stop" and choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert tuple(choice.logprobs.token_logprobs[:-1]) == scored(offline, prompt).logprobs


def test_prompt_logprobs_have_the_shape_of_vllm(client: openai.OpenAI, offline: App) -> None:
    assert offline.tokenizer is not None
    prompts = [PROMPT, "Question:"]
    extra = {"prompt_logprobs": 1}
    reply = client.completions.create(
        model="llama", prompt=prompts, n=2, max_tokens=2, extra_body=extra
    )
    chat = client.chat.completions.create(
        model="llama", messages=MESSAGES, max_tokens=2, extra_body=extra
    )
    cases = [(choice, prompts[choice.index // 2]) for choice in reply.choices]
    for holder, prompt in [*cases, (chat, chat_ids(offline))]:
        ids = prompt if isinstance(prompt, list) else offline.tokenizer.encode(prompt)
        found = holder.model_extra["prompt_logprobs"]
        wanted = scored(offline, ids, 1)
        assert len(found) == len(ids) and found[0] is None
        for token, one, logprob, ((best, highest),) in zip(
            ids[1:], found[1:], wanted.logprobs[1:], wanted.top[1:], strict=True
        ):
            own = one[str(token)]
            assert next(iter(one)) == str(token) and own["logprob"] == logprob
            assert own["decoded_token"] == offline.tokenizer.spell(token).decode(errors="replace")
            assert one[str(best)]["rank"] == 1 and one[str(best)]["logprob"] == highest
            assert len(one) == (1 if token == best else 2) and own["rank"] >= 1
    plain = client.completions.create(model="llama", prompt=PROMPT, max_tokens=1)
    assert "prompt_logprobs" not in (plain.choices[0].model_extra or {})


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(
    client: openai.OpenAI, offline: App
) -> None:
    prompt = [5] * offline.engine.spec.max_context
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = client.completions.create(model="llama", prompt=prompt, **asked).choices
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is None
    assert len(choice.logprobs.token_logprobs or ()) == len(prompt)
    assert choice.finish_reason == "length"


def test_completion_streams(client: openai.OpenAI, offline: App) -> None:
    chunks = list(
        client.completions.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].text for c in chunks[:-1])
    assert text == answer(offline, PROMPT, max_tokens=9)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_each_chunk_tells_the_usage_so_far(client: openai.OpenAI) -> None:
    wishes: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="llama", prompt=PROMPT, max_tokens=9, n=2, stream=True, stream_options=wishes
        )
    )
    counts = [c.usage.completion_tokens for c in chunks if c.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] > 0
    assert counts[-2] == counts[-1] > counts[0]
    assert len({c.usage.prompt_tokens for c in chunks if c.usage is not None}) == 1


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=6, logprobs=2)
    found = reply.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert "".join(found.tokens) == reply.choices[0].text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert found.top_logprobs is not None and found.token_logprobs is not None
    assert all(len(top) == 2 for top in found.top_logprobs)
    best = [max(top.values()) for top in found.top_logprobs]
    assert found.token_logprobs == best


def test_offsets_of_a_stream_are_those_of_the_whole(client: openai.OpenAI, offline: App) -> None:
    """While a stop text may have begun, and where special tokens are text."""
    assert offline.tokenizer is not None
    mark = next(iter(offline.tokenizer.special - offline.end_tokens))
    prompt = "Question: Where is Melkar?\nPassage:"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop": [" city at the moon", " River of old"]}, " city at the mouth of"),
        ({"logit_bias": {str(mark): 100}}, offline.tokenizer.decode([mark], special=True)),
    ]
    for extra, word in cases:
        asked: dict[str, Any] = {"model": "llama", "max_tokens": 16, "logprobs": 0, **extra}
        asked["extra_body"] = {"skip_special_tokens": False}
        (whole,) = client.completions.create(prompt=prompt, temperature=0, **asked).choices
        chunks = client.completions.create(prompt=prompt, temperature=0, stream=True, **asked)
        pieces = [chunk.choices[0].logprobs for chunk in chunks]
        assert whole.logprobs is not None and word in whole.text
        tokens, offsets = whole.logprobs.tokens or [], whole.logprobs.text_offset or []
        assert [place for one in pieces if one for place in one.text_offset or ()] == offsets
        for place, token in zip(offsets, tokens, strict=True):
            assert whole.text[place:].startswith(token)


@pytest.mark.parametrize(
    "extra", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=["top_k", "min_p", "top_p"]
)
def test_narrow_sampling_is_greedy(
    client: openai.OpenAI, offline: App, extra: dict[str, Any]
) -> None:
    reply = client.completions.create(
        model="llama", prompt=PROMPT, temperature=1.5, max_tokens=8, extra_body=extra
    )
    assert reply.choices[0].text == answer(offline, PROMPT, max_tokens=8)


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0, "ignore_eos": True},
    {"frequency_penalty": 2.0, "ignore_eos": True},
    {"repetition_penalty": 3.0},
    {"logit_bias": {"535": -100}},
    {"min_tokens": 20},
    {"stop_token_ids": [265]},
    {"stop_token_ids": [265], "include_stop_str_in_output": True},
    {"bad_words": ["is", "of"]},
    {"allowed_token_ids": [*range(32, 127)], "temperature": 1.0, "seed": 3},
]


@pytest.mark.parametrize("fields", RULES, ids="-".join)
def test_rules_for_logits_are_the_offline_ones(
    client: openai.OpenAI, offline: App, fields: dict[str, Any]
) -> None:
    """`test_logits` holds those to a reference."""
    asked = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=48, extra_body=fields, logprobs=1
    )
    (found,) = offline.generate([PROMPT], max_tokens=48, **fields, logprobs=1)
    plain = answer(offline, PROMPT, max_tokens=48, ignore_eos="ignore_eos" in fields)
    assert asked.choices[0].text == found.text != plain
    assert asked.choices[0].finish_reason == found.finish_reason
    shown, noted = asked.choices[0].logprobs, found.logprobs
    assert shown is not None and shown.token_logprobs is not None and noted is not None
    ends = offline.engine.spec.eos_token_ids  # no text, and not shown
    assert shown.token_logprobs == [one.logprob for one in noted if one.token_id not in ends]
    chat = {"max_tokens": 48, "model": "llama", "messages": MESSAGES, "extra_body": fields}
    reply = client.chat.completions.create(**chat)
    wanted = answer(offline, chat_ids(offline), max_tokens=48, **fields)
    assert reply.choices[0].message.content == wanted


def test_one_token_wins_by_its_bias(client: openai.OpenAI, offline: App) -> None:
    assert offline.tokenizer is not None
    (token,) = offline.tokenizer.encode("z", special=False)
    reply = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=5, logit_bias={str(token): 100}
    )
    assert reply.choices[0].text == "zzzzz"


def test_a_prompt_is_cut_to_its_last_tokens(client: openai.OpenAI, offline: App) -> None:
    assert offline.tokenizer is not None
    ids = offline.tokenizer.encode(PROMPT)
    reply = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=6, extra_body={"truncate_prompt_tokens": 9}
    )
    assert reply.choices[0].text == answer(offline, ids[-9:], max_tokens=6)
    assert reply.usage is not None and reply.usage.prompt_tokens == 9


def test_the_models_own_defaults_stand(client: openai.OpenAI, offline: App) -> None:
    """generation_config.json says `do_sample: false`: no temperature means 0, not OpenAI's 1."""
    reply = client.completions.create(model="llama", prompt="Question:", max_tokens=12)
    assert reply.choices[0].text == answer(offline, "Question:", max_tokens=12)
