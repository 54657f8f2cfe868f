"""A checkpoint as people use it: text or token ids in, the same out.

import neuron_moe
model = neuron_moe.load("openai/gpt-oss-20b")
print(model.chat("Which expert answers?"))
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, overload

import torch
from torch import nn

from neuron_moe.errors import reject_unknown
from neuron_moe.explain import Explanation
from neuron_moe.models.chat import ChatTemplate
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.generation import Decoder, GenerationOptions, generate, stream
from neuron_moe.models.loader import load_model, read_config
from neuron_moe.models.routing_trace import recorded_load
from neuron_moe.models.shipped import checkpoint_folder
from neuron_moe.models.text import TextCodec, TextStream, special_tokens
from neuron_moe.models.whole_model import (
    TARGETS,
    Serving,
    ServingPlan,
    plan_model,
    plan_serving,
)
from neuron_moe.parallel.topology import instance
from neuron_moe.planner.coefficients import Machine
from neuron_moe.planner.search import synthetic_routings

Message = Mapping[str, str]


class Choice(TypedDict, total=False):
    """How tokens are chosen, as in `GenerationOptions`.

    By default 64 tokens, the likeliest ones, up to a stop token of the checkpoint.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: tuple[int, ...]


def load(
    model: str | Path,
    *,
    download: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
    **options: Any,
) -> "LanguageModel":
    """Load a checkpoint, ready to answer.

    Args:
        model: its folder, an id of Hugging Face such as "openai/gpt-oss-20b" whose files are in
            the hub's cache, or "tiny_gpt_oss", which is shipped.
        download: fetch an id that the cache does not hold.
        dtype: of the weights: torch.bfloat16, float32 or float16.
        backend: what computes the experts: "torch", "nki" (the chip's kernels, in the simulator
            where there is no chip) or "cuda".
        options: as `load_model` takes them, such as product_form="measured" on a CPU.

    Raises:
        FileNotFoundError: there is nothing of that name, or a file is missing.
        OSError: it cannot be downloaded.
        ValueError: it is no model that is read here, or a file of it is wrong.
    """
    folder = checkpoint_folder(model, download=download)
    loaded = load_model(folder, dtype=dtype, backend=backend, **options)
    if backend == "cuda" and torch.cuda.is_available():  # else Triton's interpreter runs
        loaded.to("cuda")
    return LanguageModel(folder, loaded)


class Prompting:
    """How the checkpoint in a folder reads what it is asked; files are read when they are needed.

    Attributes:
        folder: of the checkpoint.
        stop_token_ids: tokens that end an answer.
        pad_token_id: filler of left padding.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop_token_ids, self.pad_token_id = special_tokens(folder)

    @cached_property
    def codec(self) -> TextCodec:
        """Its tokenizer."""
        return TextCodec(self.folder)

    @cached_property
    def template(self) -> ChatTemplate:
        """Its chat template."""
        return ChatTemplate(self.folder)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, which may be ids already."""
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        if not (isinstance(ids, Sequence) and all(isinstance(each, int) for each in ids)):
            raise ValueError(
                f"prompt={prompt!r}: must be a text, a list of token ids such as [1, 2, 3], or a"
                " list of such. Convert arrays with .tolist()."
            )
        return list(ids)

    def encode_chat(
        self, messages: str | Sequence[Message], system: str | None = None
    ) -> list[int]:
        """Return the token ids that request the answer to a message or to the last of several.

        Args:
            messages: what a user says, or each with its `role` and `content`.
            system: how to answer, said before all else.
        """
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        prompt = [] if system is None else [{"role": "system", "content": system}]
        return self.codec.encode(self.template.render([*prompt, *asked]), is_template=True)


class LanguageModel:
    """A loaded checkpoint; made by `load`.

    Attributes:
        model: the torch module, for logits and layers.
        prompting: its tokenizer, chat template and special tokens.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.model, self.prompting = model, Prompting(folder)

    def __repr__(self) -> str:
        experts = moe_layers(self.model)
        return (
            f"LanguageModel({str(self.prompting.folder)!r}: {len(self.model.layers)} layers,"  # type: ignore[arg-type]
            f" {len(experts)} with {experts[0].router.num_experts} experts)"
        )

    @overload
    def generate(self, prompt: str, **choice: Unpack[Choice]) -> str: ...

    @overload
    def generate(self, prompt: Sequence[int], **choice: Unpack[Choice]) -> list[int]: ...

    @overload
    def generate(self, prompt: list[str], **choice: Unpack[Choice]) -> list[str]: ...

    @overload
    def generate(
        self, prompt: Sequence[Sequence[int]], **choice: Unpack[Choice]
    ) -> list[list[int]]: ...

    def generate(self, prompt: Any, **choice: Unpack[Choice]) -> Any:
        """Continue a prompt, or several at once.

        Args:
            prompt: a text, or token ids, also as a tensor; or a list of them.
            choice: see `Choice`.

        Returns:
            What follows: a text for a text, token ids for token ids, a list for a list.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or too long a text.
        """
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        is_one = isinstance(prompt, str) or all(isinstance(item, int) for item in prompt)
        prompts = [prompt] if is_one else list(prompt)
        ids = [self.prompting.encode(each) for each in prompts]
        found = generate(self._decoder, ids, self._options(choice)).token_ids
        answers = [
            self.prompting.codec.decode(answer) if isinstance(asked, str) else answer
            for asked, answer in zip(prompts, found, strict=True)
        ]
        return answers[0] if is_one else answers

    @overload
    def stream(self, prompt: str, **choice: Unpack[Choice]) -> Iterator[str]: ...

    @overload
    def stream(self, prompt: Sequence[int], **choice: Unpack[Choice]) -> Iterator[int]: ...

    def stream(self, prompt: Any, **choice: Unpack[Choice]) -> Iterator[Any]:
        """Continue one prompt; yield pieces of text, or token ids, as they are there.

        Args:
            prompt: a text, or token ids.
            choice: see `Choice`.
        """
        ids = self.prompting.encode(prompt)
        return self._pieces(ids, choice) if isinstance(prompt, str) else self._ids(ids, choice)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        on_text: Callable[[str], object] | None = None,
        **choice: Unpack[Choice],
    ) -> str:
        """Answer a message, or the last of a conversation, through the chat template.

        Args:
            messages: what the user says; or all messages, each with its `role` and `content`.
            system: how to answer, said before all else.
            on_text: called with each piece of the answer as it is there.
            choice: see `Choice`.

        Raises:
            ValueError: the checkpoint has no chat template, or it refuses these messages.
        """
        answer = ""
        for piece in self._pieces(self.prompting.encode_chat(messages, system), choice):
            answer += piece
            if on_text is not None:
                on_text(piece)
        return answer

    def explain(self, phase: str = "decode", tokens: int = 1) -> Explanation:
        """Say how the first MoE layer computes a step, why, and how to change that.

        Args:
            phase: "prefill" or "decode".
            tokens: of the step.
        """
        return moe_layers(self.model)[0].explain(phase, tokens)

    def plan(
        self,
        machine: str = "trn2.48xlarge",
        *,
        target: str = TARGETS[0],
        prompt: int | None = None,
        batch: int = 64,
        context: int | None = None,
    ) -> ServingPlan:
        """Say which layout of a machine serves the model best; computed, nothing is run.

        Args:
            machine: an instance of AWS.
            target: what counts: "throughput", "ttft" or "tpot".
            prompt: tokens of a prompt; None: 8,192, or fewer where the model ends before.
            batch: sequences that are decoded at once.
            context: positions of a sequence; None: the prompt and 1,024 more, as far as there are.

        Raises:
            ValueError: more positions than the model has, or a model that is not planned.
        """
        folder = self.prompting.folder
        planned = plan_model(folder.name, read_config(folder))
        serving = Serving.of(planned, prompt, batch, context)
        load_E, _ = recorded_load(None)
        routings = synthetic_routings(planned.sizes, max(serving.prompt, batch), load_E)
        return plan_serving(
            planned,
            Machine.build(instance(machine)),
            routings["zipf" if load_E is None else "recorded"][1],
            serving,
            target,
        )

    @property
    def _decoder(self) -> Decoder:
        return cast(Decoder, self.model)

    def _options(self, choice: Choice) -> GenerationOptions:
        reject_unknown("generate()", choice, Choice.__annotations__)
        reader = self.prompting
        values: dict[str, Any] = {"max_new_tokens": 64, "stop_token_ids": reader.stop_token_ids}
        values |= cast(dict[str, Any], choice)
        return GenerationOptions(**values, pad_token_id=reader.pad_token_id)

    def _ids(self, prompt: list[int], choice: Choice) -> Iterator[int]:
        found = stream(self._decoder, [prompt], self._options(choice))
        return (token for _, token in found)

    def _pieces(self, prompt: list[int], choice: Choice) -> Iterator[str]:
        text = TextStream(self.prompting.codec, prompt)
        for token in self._ids(prompt, choice):
            if piece := text.push(token):
                yield piece
        if piece := text.finish():
            yield piece
