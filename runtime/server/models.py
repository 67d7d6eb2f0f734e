"""The models behind one port, by id: what each can do, and its texts to token ids.

In: opened apps with their names. Out: `ServedModel`s; an unknown id or a model that cannot do what
it is asked for is an `ApiError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from dovetail.ir.errors import LengthError, RequestError, SpecError
from dovetail.ir.model import ModelFile
from dovetail.ir.options import advised
from dovetail.runtime.app import App
from dovetail.runtime.embed.texts import TextEncoder
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.server.errors import ApiError, too_long
from dovetail.runtime.server.forms import blame_field
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.runtime.text.tools import ChatStyle

Skill: TypeAlias = Literal["generate", "embed", "rerank"]
SAID: dict[Skill, str] = {
    "generate": "generate text",
    "embed": "embed texts",
    "rerank": "rank documents",
}


@dataclass(frozen=True)
class ServedModel:
    """One artifact under its id. An artifact may hold a model that generates, and encoders.

    only: the encoder that this id stands for, where it is not all of the artifact. adapter: the one
    that answers; parent: the id of the model that it belongs to.
    """

    id: str
    app: App
    only: str | None = None
    adapter: str | None = None
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def whole(self) -> bool:
        """Whether this id stands for all of the artifact."""
        return self.only is None and self.adapter is None

    @cached_property
    def file(self) -> ModelFile | None:
        """The model that generates."""
        if self.only:
            return None
        return next((part.file for part in self.app.artifact.models.values()), None)

    def read_texts(self) -> None:
        """Read chat template and tokenizer now: a damaged one is told of, no request waits for it.

        Raises ArtifactError where one is damaged.
        """
        _ = self.app.template
        if self.app.tokenizer is not None:
            self.app.tokenizer.check()

    @cached_property
    def encoder(self) -> TextEncoder | None:
        """The encoder that embeds."""
        return self._choose(labels=False)

    @cached_property
    def ranker(self) -> TextEncoder | None:
        """The cross-encoder."""
        return self._choose(labels=True)

    @cached_property
    def skills(self) -> frozenset[Skill]:
        """What the model can be asked for; vectors rank documents, too."""
        found: set[Skill] = {"generate"} if self.file else set()
        if self.adapter:
            return frozenset(found)
        if self.encoder:
            found |= {"embed", "rerank"}
        if self.ranker:
            found.add("rerank")
        return frozenset(found)

    @property
    def capabilities(self) -> list[str]:
        """The same for clients, and `chat` where there is a template for it."""
        chats = "generate" in self.skills and self.app.template is not None
        return sorted({*self.skills, *(("chat",) if chats else ())})

    @cached_property
    def fingerprint(self) -> str:
        """What identifies weights and plan to clients."""
        return f"fp_{self.app.artifact.manifest.model_fingerprint[:12]}"

    @property
    def context(self) -> int:
        """Tokens that a request may have in all."""
        if self.file:
            return self.app.generator.context
        found = self.encoder or self.ranker
        return found.spec.max_tokens if found else 0

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """Options where a request names none: the checkpoint's own, else OpenAI's."""
        return {"temperature": 1.0, **advised(self.file.generation if self.file else {})}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that generates; ApiError where it has none."""
        if self.app.tokenizer is None:
            raise ApiError(400, f"the model {self.id!r} has no tokenizer; give token ids")
        return self.app.tokenizer

    def encode(
        self, text: str, *, param: str = "prompt", special: bool = True, last: int | None = None
    ) -> list[int]:
        """Return the ids of a prompt, the `last` ones if it says; see `Tokenizer.encode`.

        Raises ApiError where they are more than the context holds.
        """
        try:
            return self.tokenizer.encode(text, special=special, most=self.context, last=last)
        except LengthError as error:
            raise too_long(str(error), param=param) from None

    @property
    def style(self) -> ChatStyle:
        """How the model writes calls and reasoning."""
        return self.app.generator.style

    async def try_form(self, form: StructuredOutputs, *, param: str) -> None:
        """Have the grammar of a form known; ApiError where it cannot be followed."""
        forms = self.app.generator.forms
        _ = self.tokenizer
        with blame_field(param):
            await asyncio.wrap_future(forms.start(form))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        last: int | None = None,
    ) -> str:
        """Return the text of a conversation, for `encode` without special tokens.

        last: tokens of it that will be asked for, so that it may be longer than the context.
        """
        if self.app.template is None:
            said = f"the model {self.id!r} has no chat template; use /v1/completions"
            raise ApiError(400, said)
        prompts = self.app.chat_prompts
        if (last is None or last > self.context) and prompts.surely_too_long(messages):
            said = f"the messages have more than {self.context} tokens, all that the context holds"
            raise too_long(f"{said}; shorten them", param="messages")
        prompt = prompts.template.start(
            messages, add_generation_prompt=add_generation_prompt, options=options
        )
        return await asyncio.wrap_future(prompt)

    def _choose(self, *, labels: bool) -> TextEncoder | None:
        try:
            return self.app.embeddings.choose(self.only, labels=labels)
        except RequestError:
            return None


class Models:
    """The served models in order; the first one that can is the default.

    Each encoder of an artifact with several has an id of its own too, `artifact/encoder`, and each
    adapter its name.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_id = {model.id: model for model in models}
        for model in models:
            encoders = tuple(model.app.embeddings.encoders)
            if len(encoders) > 1:  # each can be asked for by its name as well
                for name in encoders:
                    one = replace(model, id=f"{model.id}/{name}", only=name)
                    self._by_id.setdefault(one.id, one)
            for name in model.file.spec.adapters if model.file else ():
                if (other := self._by_id.get(name)) is not None:
                    said = f"an adapter of {model.id!r} has the name of another model, {name!r}"
                    how = "give that one a --served-model-name"
                    if other.adapter:
                        how = f"compile one of them with another name: --adapter OTHER={name}"
                    raise SpecError(f"{said}; {how}")
                self._by_id[name] = replace(model, id=name, adapter=name, parent=model.id)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_id.values())

    def exchange(self, name: str, app: App) -> Models:
        """Return these models with another app behind the id `name`."""
        whole = [model for model in self if model.whole]
        return Models([replace(m, app=app) if m.id == name else m for m in whole])

    def take(self, others: Models) -> None:
        """Become `others`, which have the same ids: requests that come now go to their apps."""
        self._by_id = others._by_id

    def find(
        self, name: str | None, skill: Skill | None = None, *, beside: Iterable[str] = ()
    ) -> ServedModel:
        """Return the model of that id; ApiError where there is none, or it lacks the `skill`.

        beside: ids of workflows, for that error.
        """
        if name is None:
            able = (model for model in self if skill is None or skill in model.skills)
            name = next((model.id for model in able), "")
        found = self._by_id.get(name)
        if found is None and name in beside:
            raise ApiError(400, f"{name!r} is a workflow; use /v1/chat/completions", param="model")
        if found is None:
            known = ", ".join(map(repr, (*self._by_id, *beside)))
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )
        if skill is not None and skill not in found.skills:
            others = ", ".join(repr(model.id) for model in self if skill in model.skills)
            other = f"use {others}" if others else "no model here does"
            said = f"the model {name!r} does not {SAID[skill]}; {other}"
            raise ApiError(400, said, param="model")
        return found

    def close(self) -> None:
        """Close all apps; an app may stand under several ids."""
        for model in self:
            if model.whole:
                model.app.close()
