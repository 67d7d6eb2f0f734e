"""Trains the small Llama on lessons from fresh worlds: a seed in, a Hugging Face folder out.

Run: python examples/tiny_world/train_llama.py --out FOLDER. Stopped and run again, it goes on from
the checkpoint in --work. No downloads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.tiny_world import SEED
from dovetail.tiny_world.corpus import bundled_world
from dovetail.tiny_world.lessons import JUDGING, READING, Mix, Segment, draw_lesson
from dovetail.tiny_world.prompts import ASSISTANT, END, PAD, USER
from dovetail.tiny_world.world import World, build_world

LESSON_COUNTS = {"country": 60, "city": 150, "river": 60, "person": 300, "company": 90, "book": 100}
"""A lesson world is small, so that its entities meet each other often."""
LESSONS_PER_WORLD = 480
VOCABULARY = 1536
CONTEXT = 1024
PIECES = r" ?\d{1,2}"
"""Cut off before the merges: two digits, so that a year is copied as two tokens."""
WARM_UP = 300
EASY_STEPS, EASY_AT_LAST = 900, 0.2
PROMPT_WEIGHT = 0.3
"""Weight of the loss on prompt tokens; replies weigh 1 (names in documents cannot be foreseen)."""
BATCHES_SORTED = 8
"""Lessons of this many batches are sorted by length: little padding."""
LOG_EVERY = 50

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def config() -> LlamaConfig:
    """Return the architecture: 2.0 M parameters, grouped queries, tied embeddings."""
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


def lesson_world(seed: int, taken: frozenset[str]) -> World:
    """Return a fresh world for lessons."""
    return build_world(seed, LESSON_COUNTS, taken=taken)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps up to `last` with one mix of lessons.

    The rate falls from `rate` along a cosine that would reach zero after `horizon` steps.
    """

    last: int
    rate: float
    horizon: int
    mix: Mix


STAGES = (
    Stage(last=2900, rate=1.5e-3, horizon=5000, mix=READING),
    Stage(last=5400, rate=1e-3, horizon=3600, mix=JUDGING),
    Stage(last=7400, rate=8e-4, horizon=2000, mix=JUDGING),
    Stage(last=9600, rate=8e-4, horizon=2200, mix=JUDGING),
)
"""To find and copy an answer comes first; to say that there is none, and to compare, later."""


def stage_of(step: int) -> tuple[int, Stage]:
    """Return the steps before the stage of `step` (from 0), and the stage."""
    before = 0
    for stage in STAGES[:-1]:
        if step < stage.last:
            return before, stage
        before = stage.last
    return before, STAGES[-1]


def learning_rate(step: int) -> float:
    """Return the rate of `step`: linear warm-up, then the cosine of its stage."""
    before, stage = stage_of(step)
    along = min(1.0, (step - before) / stage.horizon)
    falling = stage.rate * max(0.02, (1 + math.cos(math.pi * along)) / 2)
    return falling * min(1.0, (step + 1) / WARM_UP)


def easy_share(step: int) -> float:
    """Return the share of easy lessons: all at first, then fewer, EASY_AT_LAST in the end."""
    left = 1 - (step - EASY_STEPS) / EASY_STEPS
    return min(1.0, max(EASY_AT_LAST, left))


Plan = Callable[[int], tuple[Mix, float]]
"""Number of a lesson to its mix and the share of easy ones."""


def tokenizer_plan(lesson: int) -> tuple[Mix, float]:
    """Plan the lessons that the tokenizer is trained on."""
    return READING, easy_share(lesson)


def draw_lessons(seed: int, taken: frozenset[str], plan: Plan) -> Iterator[list[Segment]]:
    """Yield lessons without end, from a new world every LESSONS_PER_WORLD."""
    rng = random.Random(seed)
    for i in itertools.count():
        if i % LESSONS_PER_WORLD == 0:
            world = lesson_world(rng.getrandbits(48), taken)
        yield draw_lesson(rng, world, *plan(i))


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
    """Return the weighted loss and the share of reply tokens that the model would have said."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids[:, :-1]).logits
    wanted, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), reduction="none"
    )
    loss = (losses * weights.flatten()).sum() / weights.sum()
    replies = weights == 1.0
    right = (logits.argmax(-1) == wanted)[replies].float().mean().item()
    return loss, right


class Trainer:
    """The model with its optimizer (AdamW) and the steps done."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = LlamaForCausalLM(config())
        self.done = 0
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01
        )
        self._parts = {"model": self.model, "optimizer": self._optimizer}

    def step(self, batch: Batch) -> tuple[float, float]:
        """Learn from a batch; return its loss and the share of right reply tokens."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.done)
        loss, right = loss_of(self.model, batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.done += 1
        return loss.item(), right

    def save(self, path: Path) -> None:
        """Write a checkpoint; a kill leaves the old one or the new one."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({"step": self.done, **state}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

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
    seed = SEED + 1 + trainer.done
    first = trainer.done

    def plan(lesson: int) -> tuple[Mix, float]:
        step = first + lesson // settings.batch
        return stage_of(step)[1].mix, easy_share(step)

    lessons = draw_lessons(seed, taken, plan)
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
    parser.add_argument("--steps", type=int, default=STAGES[-1].last)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--quiet", action="store_true")
    settings = parser.parse_args()
    settings.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    taken = held_out_names()
    tokenizer = train_tokenizer(draw_lessons(SEED, taken, tokenizer_plan))
    save(train(settings, tokenizer, taken), tokenizer, settings.out)


if __name__ == "__main__":
    main()
