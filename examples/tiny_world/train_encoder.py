"""Trains the small BERT encoder: a seed goes in, a sentence-transformers folder comes out.

Run: python examples/tiny_world/train_encoder.py --out FOLDER. Questions and their passages come
from fresh worlds; the other passages of a batch are the negatives. No downloads.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch.nn import functional
from transformers import BertConfig, BertModel

from dovetail.tiny_world import SEED
from dovetail.tiny_world.questions import single_hop
from dovetail.tiny_world.train_llama import held_out_names, lesson_world, write_json
from dovetail.tiny_world.world import World

VOCABULARY = 3000
CONTEXT = 256
BATCHES_PER_WORLD = 4
ALIKE = 0.5
"""Share of worlds whose names look alike."""
TEMPERATURE = 0.05
WARM_UP = 100
LOG_EVERY = 50
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Pair = tuple[str, str]


def config() -> BertConfig:
    """Return the architecture: 0.9 M parameters."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def draw_pairs(rng: random.Random, world: World, size: int) -> list[Pair]:
    """Return `size` pairs (question, passage) of distinct passages."""
    pairs: dict[str, Pair] = {}
    while len(pairs) < size:
        fact = rng.choice(world.by_split["train"])
        passage = world.source[fact.subject.name, fact.relation.name]
        pairs[passage.id] = single_hop(rng, world, fact).question, passage.document
    return list(pairs.values())


def draw_batches(seed: int, size: int, taken: frozenset[str]) -> Iterator[list[Pair]]:
    """Yield batches without end, from a new world every BATCHES_PER_WORLD."""
    rng = random.Random(seed)
    while True:
        world = lesson_world(rng.getrandbits(48), taken, ALIKE)
        for _ in range(BATCHES_PER_WORLD):
            yield draw_pairs(rng, world, size)


def train_tokenizer(source: Iterator[list[Pair]], batches: int = 40) -> Tokenizer:
    """Return a lower-casing WordPiece tokenizer with BERT's special tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.BertPreTokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, digits])
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False
    )
    texts = (text for _ in range(batches) for pair in next(source) for text in pair)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(CONTEXT)
    return tokenizer


def embed(model: BertModel, tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return unit-length mean-pooled embeddings [len(texts), 128]."""
    rows = [tokenizer.encode(text).ids for text in texts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    hidden = model(ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).float()
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def train(settings: argparse.Namespace, tokenizer: Tokenizer, taken: frozenset[str]) -> BertModel:
    """Return the encoder after `settings.steps` steps of symmetric InfoNCE; one-cycle AdamW."""
    torch.manual_seed(SEED)
    model = BertModel(config(), add_pooling_layer=False)
    optimizer = torch.optim.AdamW(model.parameters(), settings.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, settings.steps + 1, pct_start=min(0.5, WARM_UP / settings.steps)
    )
    source = draw_batches(SEED + 1, settings.batch, taken)
    total = right = 0.0
    for step in track(range(1, settings.steps + 1), "training", disable=settings.quiet):
        pairs = next(source)
        questions = embed(model, tokenizer, [question for question, _ in pairs])
        passages = embed(model, tokenizer, [passage for _, passage in pairs])
        scores = questions @ passages.T / TEMPERATURE
        wanted = torch.arange(len(pairs))
        loss = (
            functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.T, wanted)
        ) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        right += (scores.argmax(1) == wanted).float().mean().item()
        if step % LOG_EVERY == 0:
            print(
                f"step {step}: loss {total / LOG_EVERY:.4f}, first of the batch right"
                f" {right / LOG_EVERY:.4f}",
                flush=True,
            )
            total = right = 0.0
    return model


def save(model: BertModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder in sentence-transformers layout; weights in float32."""
    (out / "1_Pooling").mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    weights.pop("embeddings.position_ids", None)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model.config.architectures = ["BertModel"]
    model.config.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL},
        },
    )
    write_json(
        out / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(
                (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
            )
        ],
    )
    write_json(
        out / "1_Pooling/config.json",
        {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True},
    )
    write_json(
        out / "sentence_bert_config.json", {"max_seq_length": CONTEXT, "do_lower_case": False}
    )
    write_json(
        out / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"}
    )


def main() -> None:
    """Train and write the encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet", action="store_true")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    taken = held_out_names()
    tokenizer = train_tokenizer(draw_batches(SEED, 128, taken))
    save(train(settings, tokenizer, taken), tokenizer, settings.out)


if __name__ == "__main__":
    main()
