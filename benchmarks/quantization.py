"""What quantized weights, and keys and values kept in 8 bits, change: logits, choices of tokens and perplexity, beside the same model
in float32 and bfloat16.

    python benchmarks/quantization.py [--model catalog://smollm2-135m] [--texts 12] [--tokens 256] [--only weights|kv]

Each kind is computed twice: by the torch runner on dequantized weights with float32 activations, which shows what the weights have
lost, and by the native runner (`native`), whose activations become whole numbers as well. `bfloat16` is how a model runs that nobody
quantized. The text is the model's own: drawn from it in float32 at temperature 1, so its perplexity there is the
entropy of what it says.

SmolLM2 comes to us in Q4_1, and weights that lie on a grid of Q4_1 would be quantized to Q4_1 without any error. So its channels are
put into another order first, everywhere alike: the model computes the same (it is checked), but a block holds other neighbours than
those that shared a scale.

Columns: MB of weights; `weights`, rms error of matrices over their rms; `logits`, rms error over their standard deviation; `KL`,
mean nats from float32's distribution; `top-1`, how often the likeliest token is float32's, given the same text; `perplexity` of the
text, and over float32's; `greedy`, tokens of a greedy text of 32 before the first that differs from float32's, mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.hub import resolve
from banyan_runtime.model import blocks, loader
from banyan_runtime.model.block_values import BlockKind
from banyan_runtime.model.blocks import Parameter
from banyan_runtime.model.choice import Choice, choose
from banyan_runtime.model.forward import Forward
from banyan_runtime.model.native.forward import NativeModel
from banyan_runtime.model.table import SlotTable
from banyan_runtime.model.torch_forward import TorchModel
from banyan_runtime.models import registry
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.step import I32, SamplingColumns, Step, TableShape

CPU = torch.device("cpu")
GREEDY = 32  # tokens
PROMPTS = (
    "The history of the printing press begins in the fifteenth century, when",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Once upon a time, in a small village by the sea, there lived a girl who",
    "In physics, the conservation of energy means that",
    "Dear Sir or Madam, I am writing to you because of the delivery that",
    "Question: Why is the sky blue during the day and red at sunset?\nAnswer:",
    "To make a simple tomato soup for four people, first",
    "The main difference between a virus and a bacterium is",
    "Breaking news: after three days of heavy rain, the river",
    "Here are five reasons to learn a second language:\n1.",
    "It is often said that the pen is mightier than the sword, but",
    "import numpy as np\n\n# Compute the eigenvalues of a symmetric matrix\n",
)
Kinds = Callable[[str, int], BlockKind | None]
"""What a matrix becomes, by its name and the length of its rows."""


def all_in(kind: BlockKind, head: BlockKind | None = None) -> Kinds:
    return lambda name, columns: (head or kind) if name in ("embed", "head") else kind


def down_in(kind: BlockKind) -> Kinds:
    """K kinds need rows of 256, which of SmolLM2's matrices only these have."""
    return lambda name, columns: kind if name.endswith(".down") else "Q8_0"


VARIANTS: dict[str, Kinds] = {
    "Q8_0 (w8a16)": all_in("Q8_0"),
    "Q4_1, head Q8_0 (w4a16)": all_in("Q4_1", "Q8_0"),
    "Q4_0, head Q8_0": all_in("Q4_0", "Q8_0"),
    "Q4_1": all_in("Q4_1"),
    "Q8_0, head Q4_1": all_in("Q8_0", "Q4_1"),
    "down Q6_K, else Q8_0": down_in("Q6_K"),
    "down Q4_K, else Q8_0": down_in("Q4_K"),
    "down Q4_1, else Q8_0": down_in("Q4_1"),
}


KEPT = {"KV in fp8_e4m3": torch.float8_e4m3fn, "KV in fp8_e5m2": torch.float8_e5m2}


class Computed:
    """A model with some weights, that is given one sequence at a time."""

    def __init__(self, choice: Choice, parameters: dict[str, Parameter], positions: int, *, native: bool = False) -> None:
        self._forward: Forward = (NativeModel if native else TorchModel)(choice, parameters, lambda: None).forward(positions, 1)
        self._forward.reserve(1, positions, torch.zeros(1, dtype=torch.int64))
        self._table = SlotTable(TableShape(1, positions))

    def logits(self, ids: I32, start: int = 0, *, last: bool = False) -> Tensor:
        """fp32 [tokens, vocab], or [1, vocab] behind the last one alone, of tokens that begin at position `start`."""
        count = len(ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        column, whole, one = np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.int32)
        sampling = SamplingColumns(column, whole, column, column, column, column, column, np.zeros(1, np.uint64))
        step = Step("prefill", ids, positions, positions + 1, whole, one * count, one * (start + count), one, sampling)
        self._table.apply(step)
        with torch.inference_mode():
            hidden = self._forward.hidden(step, torch.from_numpy(ids.astype(np.int64)), self._table)
            return self._forward.logits(hidden[-1:] if last else hidden).clone()


@dataclass(frozen=True)
class Text:
    prompt: I32
    tokens: I32  # the prompt and what was drawn behind it
    greedy: I32  # [GREEDY] float32's own continuation of the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="catalog://smollm2-135m")
    parser.add_argument("--texts", type=int, default=12, choices=range(1, len(PROMPTS) + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", choices=["weights", "kv"], help="either weights or keys and values")
    options = parser.parse_args()
    # Both runners take turns here, and two pools of threads that spin on the same cores would stop each other.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or 1)
    folder = resolve(options.model)
    config = ServerConfig(model_path=options.model, device="cpu", dtype="float32")
    choice = choose(config, folder, registry.read(folder), CPU, fast_bf16=False, own_attention=False)
    wanted = registry.weights_of(choice.spec)
    plain = loader.dequantized(loader.load(folder, wanted, torch.float32, CPU, lambda *_: None), torch.float32, CPU)
    positions = max(options.tokens, GREEDY + 32)
    weights = shuffled(choice.spec, plain)
    reference = Computed(choice, {**weights}, positions)
    texts = written(reference, folder, options.texts, options.tokens)
    before = Computed(choice, {**plain}, positions).logits(texts[0].tokens)
    moved = (reference.logits(texts[0].tokens) - before).abs().max().item()
    assert moved < 1e-3 * before.std().item(), f"the order of channels changed what the model computes by {moved}"
    expected = [reference.logits(text.tokens) for text in texts]
    entropy = perplexity(expected, texts)
    print(f"{options.model}, {len(texts)} texts of {options.tokens} tokens; channels in another order change logits by {moved:.1g} at most")
    print(f"{'weights':26} {'MB':>6} {'weights':>8} {'logits':>8} {'KL':>9} {'top-1':>6} {'perplexity':>18} {'greedy':>6}")
    size = sum(tensor.numel() for tensor in weights.values())
    print(f"{'float32':26} {4 * size / 1e6:6.0f} {0:8.4f} {0:8.4f} {0:9.5f} {1:6.1%} {entropy:10.3f} (1.000) {GREEDY:6.1f}")

    def show(name: str, computed: Computed, nbytes: int, error: float) -> None:
        found = [computed.logits(text.tokens) for text in texts]
        pairs = list(zip(expected, found, strict=True))
        off = [(centred(one) - centred(other)).square().mean().item() for one, other in pairs]
        spread = [centred(one).square().mean().item() for one, _ in pairs]
        kl = [(one.log_softmax(-1).exp() * (one.log_softmax(-1) - other.log_softmax(-1))).sum(-1).mean().item() for one, other in pairs]
        same = [(one.argmax(-1) == other.argmax(-1)).float().mean().item() for one, other in pairs]
        value = perplexity(found, texts)
        differs = [continued(computed, text.prompt) != text.greedy for text in texts]
        agreed = [int(row.argmax()) if row.any() else GREEDY for row in differs]
        print(
            f"{name:26} {nbytes / 1e6:6.0f} {error:8.4f} {(np.sum(off) / np.sum(spread)) ** 0.5:8.4f} {np.mean(kl):9.5f} "
            f"{np.mean(same):6.1%} {value:10.3f} ({value / entropy:5.3f}) {np.mean(agreed):6.1f}", flush=True,
        )  # fmt: skip

    half = dataclasses.replace(choice, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    show("bfloat16", Computed(half, {**narrow}, positions), 2 * size, off_by(weights, narrow))
    for name, kept in KEPT.items() if options.only != "weights" else ():
        show(f"{name} in float32", Computed(dataclasses.replace(choice, kv_dtype=kept), {**weights}, positions), 4 * size, 0)
        show("  in bfloat16", Computed(dataclasses.replace(half, kv_dtype=kept), {**narrow}, positions), 2 * size, off_by(weights, narrow))
    for name, kinds in VARIANTS.items() if options.only != "kv" else ():
        made = {key: quantized(key, tensor, kinds) for key, tensor in weights.items()}
        nbytes = blocks.nbytes(made.values())
        values = blocks.dequantized({**made}, torch.float32, CPU)  # which takes over what it is given
        error = off_by(weights, values)
        show(name, Computed(choice, {**values}, positions), nbytes, error)
        show("  native", Computed(choice, {**made}, positions, native=True), nbytes, error)


def quantized(name: str, tensor: Tensor, kinds: Kinds) -> Parameter:
    if tensor.ndim != 2 or (kind := kinds(name, tensor.shape[1])) is None or not blocks.fits(kind, tensor.shape[1]):
        return tensor
    return (blocks.quantize(tensor, kind),)


def shuffled(spec: DecoderSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same function with the channels of the residual stream, of the MLP and of the values in another order: of a Llama."""
    dice = np.random.default_rng(0)
    stream = torch.from_numpy(dice.permutation(spec.hidden_size))
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        part = name.rpartition(".")[2]
        found[name] = tensor[stream] if part in ("out", "down") or (tensor.ndim == 1 and "norm" in part and part[1] != "_") else tensor
        if part in ("embed", "head", "qkv", "gate_up"):
            found[name] = tensor[:, stream]
    for index, layer in enumerate(spec.layers):
        heads, kv_heads, head = layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim
        values = kv_heads * head
        inner = torch.from_numpy(dice.permutation(layer.mlp.inner))
        own = torch.from_numpy(dice.permutation(head))
        here = f"layers.{index}."
        gate, up = found[f"{here}gate_up"].chunk(2)
        found[f"{here}gate_up"] = torch.cat((gate[inner], up[inner]))
        found[f"{here}down"] = found[f"{here}down"][:, inner]
        qkv, out = found[f"{here}qkv"], found[f"{here}out"]
        found[f"{here}qkv"] = torch.cat((qkv[:-values], qkv[-values:].view(kv_heads, head, -1)[:, own].reshape(values, -1)))
        found[f"{here}out"] = out.view(len(out), heads, head)[:, :, own].reshape(len(out), -1)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def written(reference: Computed, folder: Path, texts: int, tokens: int) -> list[Text]:
    """Texts of so many tokens, drawn with a fixed seed."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt in PROMPTS[:texts]:
        begin = np.array(tokenizer.encode(prompt, add_special_tokens=False).ids, np.int32)
        drawn = continued(
            reference, begin, tokens - len(begin), lambda logits: int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        )
        found.append(Text(begin, np.concatenate((begin, drawn)), continued(reference, begin)))
    return found


def continued(
    computed: Computed, prompt: I32, tokens: int = GREEDY, choose_token: Callable[[Tensor], int] = lambda logits: int(logits.argmax())
) -> I32:
    """The tokens that follow a prompt; the likeliest ones, unless told otherwise."""
    found: list[int] = []
    ids, start = prompt, 0
    for _ in range(tokens):
        found.append(choose_token(computed.logits(ids, start, last=True)[0]))
        start += len(ids)
        ids = np.array(found[-1:], np.int32)
    return np.array(found, np.int32)


def perplexity(logits: list[Tensor], texts: list[Text]) -> float:
    """Of all tokens behind the prompts."""
    losses = [
        torch.nn.functional.cross_entropy(
            found[len(text.prompt) - 1 : -1], torch.from_numpy(text.tokens[len(text.prompt) :].astype(np.int64))
        )
        for found, text in zip(logits, texts, strict=True)
    ]
    return float(torch.stack(losses).mean().exp())


def centred(logits: Tensor) -> Tensor:
    """A constant added to all logits changes nothing."""
    return logits - logits.mean(-1, keepdim=True)


def off_by(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    matrices = [name for name, tensor in weights.items() if tensor.ndim == 2]
    error = sum((weights[name] - others[name].float()).square().sum().item() for name in matrices)
    return float((error / sum(weights[name].square().sum().item() for name in matrices)) ** 0.5)


if __name__ == "__main__":
    main()
