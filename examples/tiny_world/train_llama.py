"""Trains the small Llama on lessons from fresh worlds: a seed in, a Hugging Face folder out.

Run: python examples/tiny_world/train_llama.py --out FOLDER. Stopped and run again, it goes on from
the checkpoint in --work. No downloads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.tiny_world import SEED
from dovetail.tiny_world.blocks import (
    CONCLUDING,
    COPYING,
    DOUBTING,
    FINISHING,
    JUDGING,
    PLANNING,
    QUOTING,
    READING,
    RELATING,
    SELECTING,
    WEIGHING,
)
from dovetail.tiny_world.calls import Segment
from dovetail.tiny_world.corpus import bundled_world
from dovetail.tiny_world.lessons import FEW, Course, draw_lesson
from dovetail.tiny_world.names import Syllables
from dovetail.tiny_world.prompts import ASSISTANT, END, PAD, USER
from dovetail.tiny_world.world import World, build_world

LESSON_COUNTS = {"country": 60, "city": 150, "river": 60, "person": 300, "company": 90, "book": 100}
"""A lesson world is small, so that its entities meet each other often."""
LESSONS_PER_WORLD = 480
ALIKE, FEWEST = 0.6, 16
"""Share of lesson worlds whose names look alike, where all lessons are crowded, and the fewest
syllables of each sort there."""
VOCABULARY = 768
CONTEXT = 1024
PIECES = r" ?\d{1,2}"
"""Cut off before the merges: two digits, so that a year is copied as two tokens."""
RATES = {
    0: 0.0,
    200: 1.0,
    3290: 1.0,
    4000: 0.65,
    4700: 0.38,
    5330: 0.2,
    6400: 0.2,
    6500: 0.5,
    8500: 0.5,
    9800: 0.24,
    11800: 0.24,
    12400: 0.2,
    13000: 0.2,
    14600: 0.0,
    14700: 0.25,
    15900: 0.25,
    17100: 0.0,
    17200: 0.25,
    18600: 0.25,
    20100: 0.0,
    20200: 0.25,
    21300: 0.25,
    22500: 0.0,
    22600: 0.25,
    24600: 0.25,
    27000: 0.0,
    27060: 0.25,
    27300: 0.25,
    28300: 0.0,
    28400: 0.25,
    30300: 0.25,
    31800: 0.0,
}
"""Step to the share of the full rates there, on lines between them: the last step is the end."""
MUON_RATE, ADAMW_RATE = 0.02, 0.003
"""Full rates: Muon's for the matrices of the layers, AdamW's for the embedding and the norms."""
COURSES = {
    0: Course(READING, easy=1.0, crowded=0.0, plain=PLANNING, statements=FEW),
    1000: Course(COPYING, easy=1.0, crowded=0.5, plain=PLANNING),
    1600: Course(COPYING, easy=1.0, crowded=0.9, plain=PLANNING),
    2000: Course(COPYING, easy=0.5, crowded=0.8, plain=PLANNING),
    3000: Course(READING, easy=0.2, crowded=0.7, plain=PLANNING),
    3600: Course(JUDGING, easy=0.4, crowded=0.9, plain=PLANNING),
    5500: Course(JUDGING, easy=0.3, crowded=0.7, plain=CONCLUDING),
    6400: Course(JUDGING, easy=0.2, crowded=0.5, plain=CONCLUDING),
    10000: Course(WEIGHING, easy=0.1, crowded=0.6, plain=CONCLUDING),
    12400: Course(COPYING, easy=0.6, crowded=0.9, plain=CONCLUDING),
    13000: Course(WEIGHING, easy=0.15, crowded=0.8, plain=CONCLUDING),
    14600: Course(COPYING, easy=0.1, crowded=1.0, plain=CONCLUDING),
    15800: Course(WEIGHING, easy=0.1, crowded=0.8, plain=CONCLUDING),
    17100: Course(RELATING, easy=0.1, crowded=0.75, plain=CONCLUDING),
    20100: Course(FINISHING, easy=0.1, crowded=0.9, plain=CONCLUDING),
    22500: Course(DOUBTING, easy=0.1, crowded=0.9, plain=CONCLUDING),
    27000: Course(SELECTING, easy=0.1, crowded=0.9, plain=QUOTING),
    28300: Course(SELECTING, easy=0.1, crowded=0.9, plain=QUOTING, calling=0.5),
}
"""First step of each course. To find and copy comes first, then to compare whole names, in drills
of look-alikes; to read passages, to say that there is no answer and to conclude comes later, to
call tools last."""
CUT = Course(JUDGING, easy=0.15, crowded=0.8, plain=PLANNING)
"""What the lessons are like that the tokenizer is trained on."""
PROMPT_WEIGHT = 0.2
"""Weight of the loss on prompt tokens; replies weigh 1 (names in documents cannot be foreseen)."""
BATCHES_SORTED = 8
"""Lessons of this many batches are sorted by length: little padding."""
LOG_EVERY = 50

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|user|>Tools:' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{%- set parameters = (function.parameters or {}).get('properties') or {} %}
{{- '\\n- ' + function.name + '(' + parameters.keys() | join(', ') + ')' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{%- set call = tool_call.function if tool_call.function is defined else tool_call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>Result:\\n' + message.content + '<|end|>' }}
{%- else %}
{{- '<|user|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def config() -> LlamaConfig:
    """Return the architecture: 1.8 M parameters, grouped queries, tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.03,
    )


def held_out_names() -> frozenset[str]:
    """Return the names of the bundled world's dev and test splits: no lesson may hold them."""
    bundled = bundled_world()
    names = {e.name for e in bundled.entities.values() if e.split != "train"}
    languages = {f.object for f in bundled.facts.values() if f.relation.object == "language"}
    return frozenset(names | languages)


def lesson_world(seed: int, taken: frozenset[str], alike: float) -> World:
    """Return a fresh world for lessons; a share of `alike` have names made of few syllables."""
    rng = random.Random(seed)
    syllables = Syllables()
    if rng.random() < alike:
        syllables = syllables.few(rng, rng.randint(FEWEST, len(syllables.closed)))
    return build_world(seed, LESSON_COUNTS, taken=taken, syllables=syllables)


def learning_rate(step: int) -> float:
    """Return the share of the full rates at `step`."""
    return float(np.interp(step + 1, list(RATES), list(RATES.values())))


def course_of(step: int) -> Course:
    """Return the course at `step`."""
    return COURSES[max(first for first in COURSES if first <= step)]


def draw_lessons(
    seed: int, taken: frozenset[str], plan: Callable[[int], Course]
) -> Iterator[list[Segment]]:
    """Yield lessons without end, as `plan` wants each; from a new world every LESSONS_PER_WORLD."""
    rng = random.Random(seed)
    for i in itertools.count():
        course = plan(i)
        if i % LESSONS_PER_WORLD == 0:
            world = lesson_world(rng.getrandbits(48), taken, ALIKE * course.crowded)
        yield draw_lesson(rng, world, course)


def train_tokenizer(lessons: Iterator[list[Segment]], count: int = 4000) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `count` lessons."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ("".join(text for text, _ in next(lessons)) for _ in range(count))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, T], padded with 0, and the weight of each token's loss [B, T]."""

    ids: torch.Tensor
    weights: torch.Tensor


def encode(tokenizer: Tokenizer, lesson: list[Segment]) -> tuple[list[int], list[float]]:
    """Return ids and loss weights of a lesson; each segment is encoded on its own."""
    ids: list[int] = []
    weights: list[float] = []
    for text, is_reply in lesson:
        part = tokenizer.encode(text).ids
        ids += part
        weights += [1.0 if is_reply else PROMPT_WEIGHT] * len(part)
    return ids[:CONTEXT], weights[:CONTEXT]


def batches(
    tokenizer: Tokenizer, lessons: Iterator[list[Segment]], size: int, rng: random.Random
) -> Iterator[Batch]:
    """Yield batches of `size` lessons of like length."""
    while True:
        rows = [encode(tokenizer, next(lessons)) for _ in range(size * BATCHES_SORTED)]
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        rng.shuffle(groups)
        for group in groups:
            length = len(group[-1][0])
            ids = torch.zeros(size, length, dtype=torch.int64)
            weights = torch.zeros(size, length)
            for i, (row, weight) in enumerate(group):
                ids[i, : len(row)] = torch.tensor(row)
                weights[i, : len(row)] = torch.tensor(weight)
            yield Batch(ids, weights)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return the weighted loss and the share of replies that the model would have said."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids[:, :-1]).logits
    wanted, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), reduction="none"
    )
    loss = (losses * weights.flatten()).sum() / weights.sum()
    return loss, whole_replies(logits.argmax(-1) == wanted, weights == 1.0)


def whole_replies(right: torch.Tensor, replies: torch.Tensor) -> float:
    """Return the share of replies with every token right; both bool [B, T], True on replies.

    Most tokens of a reply repeat its question: the share of right tokens would say little.
    """
    starts = replies & ~functional.pad(replies, (1, 0))[:, :-1]
    number = (starts.flatten().cumsum(0) - 1)[replies.flatten()]
    wrong = torch.bincount(number, (~right[replies]).float())
    return float((wrong == 0).float().mean())


class Trainer:
    """The model with its optimizers and the steps done."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = LlamaForCausalLM(config())
        self.done = 0
        named = dict(self.model.named_parameters())
        matrices = [n for n, p in named.items() if p.ndim == 2 and "embed" not in n]
        muon = torch.optim.Muon([named[n] for n in matrices], MUON_RATE, weight_decay=0.01)
        rest = [p for n, p in named.items() if n not in matrices]
        adamw = torch.optim.AdamW(rest, ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self._rates = {muon: MUON_RATE, adamw: ADAMW_RATE}
        self._parts = {"model": self.model, "muon": muon, "adamw": adamw}

    def step(self, batch: Batch) -> tuple[float, float]:
        """Learn from a batch; return its loss and the share of right replies."""
        share = learning_rate(self.done)
        loss, right = loss_of(self.model, batch)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self._rates.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
        self.done += 1
        return loss.item(), right

    def save(self, path: Path) -> None:
        """Write a checkpoint; a kill leaves the old one or the new one."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({"step": self.done, **state}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def begin_with(self, folder: Path, step: int) -> None:
        """Begin at a step with the weights of a folder that `save` wrote, and fresh optimizers."""
        self.done = step
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        saved = torch.load(path, weights_only=True)
        self.done = saved["step"]
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])


def train(
    settings: argparse.Namespace, tokenizer: Tokenizer, taken: frozenset[str]
) -> LlamaForCausalLM:
    """Return the model after `settings.steps` steps."""
    trainer = Trainer()
    checkpoint = settings.work / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.restore(checkpoint)
    elif settings.start is not None:
        trainer.begin_with(settings.start, settings.start_step)
    seed = SEED + 1 + trainer.done
    first = trainer.done
    lessons = draw_lessons(seed, taken, lambda i: course_of(first + i // settings.batch))
    source = batches(tokenizer, lessons, settings.batch, random.Random(seed))
    recent: list[tuple[float, float]] = []
    left = range(trainer.done, settings.steps)
    for _ in track(left, "training", disable=settings.quiet):
        recent.append(trainer.step(next(source)))
        if trainer.done % LOG_EVERY == 0:
            loss, right = (sum(values) / len(recent) for values in zip(*recent, strict=True))
            print(f"step {trainer.done}: loss {loss:.3f}, replies right {right:.4f}", flush=True)
            recent = []
        if trainer.done % settings.save_every == 0:
            trainer.save(checkpoint)
    return trainer.model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder: weights in bfloat16, config, tokenizer, chat template."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", special)
    generation = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": False}
    write_json(out / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_llama"))
    parser.add_argument("--start", type=Path, help="folder of a model to begin with")
    parser.add_argument("--start-step", type=int, default=0, help="the step that it has come to")
    parser.add_argument("--steps", type=int, default=max(RATES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--quiet", action="store_true")
    settings = parser.parse_args()
    settings.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    taken = held_out_names()
    tokenizer = train_tokenizer(draw_lessons(SEED, taken, lambda _: CUT))
    save(train(settings, tokenizer, taken), tokenizer, settings.out)


if __name__ == "__main__":
    main()
