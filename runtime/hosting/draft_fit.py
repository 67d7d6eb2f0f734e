"""Whether a draft model speaks a model's language: token ids must mean the same to both."""

from __future__ import annotations

from dovetail.ir.errors import SpecError
from dovetail.runtime.artifact import Artifact, ModelPart, open_artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.trust import meet
from dovetail.runtime.text.tokenizer import read_tokenizer
from dovetail.topology.hardware import HardwareSpec


def check_draft(
    target: Artifact, options: EngineOptions, hardware: HardwareSpec, *, trust: bool
) -> None:
    """Open the draft model of `options`, if any and there is a model that it may draft for.

    Raises SpecError where it cannot draft for that of `target`, and as `open_artifact`.
    """
    if options.draft is None or not target.models:
        return
    draft = open_artifact(options.draft, hardware)
    meet(draft.path, trust=trust, code=draft.code)
    if not draft.models:
        raise SpecError(
            f"{draft.path} has no model that generates, so none that drafts; {_INSTEAD}"
        )
    model, small = (next(iter(one.models.values())) for one in (target, draft))
    problem = _compare(model, small)
    if problem:
        raise SpecError(f"{draft.path} cannot draft for {target.path}: {problem}; {_INSTEAD}")


def _compare(model: ModelPart, small: ModelPart) -> str:
    """Return in what the vocabularies differ, "" where they do not."""
    sizes = small.file.spec.vocab_size, model.file.spec.vocab_size
    if model.tokenizer is None or small.tokenizer is None:
        return "" if sizes[0] == sizes[1] else f"it has {sizes[0]} tokens, the model {sizes[1]}"
    if model.tokenizer.read_bytes() == small.tokenizer.read_bytes():
        return ""
    both = map(read_tokenizer, (model.tokenizer, small.tokenizer))
    theirs, ours = (one.get_vocab(with_added_tokens=True) for one in both)
    differing = sum(ours.get(text) != token for text, token in theirs.items())
    if not differing:
        return ""
    return (
        f"of the {len(theirs)} tokens that the model has, {differing} are others in the draft model"
    )


_INSTEAD = "give a smaller model of the same family, which shares the vocabulary, or omit the draft"
