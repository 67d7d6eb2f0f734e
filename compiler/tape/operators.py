"""The operators of a tape: the slots of the kernel behind each op, and what each is to it.

One table feeds the tape builder (order of slots, barriers), the buffer planner (what is read and
written) and the verifier.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.tape import Entry, Slot

READS = frozenset({"in", "inout"})
WRITES = frozenset({"out", "inout", "part"})
POINTERS = READS | WRITES | {"weight", "weight?", "in?"}


@dataclass(frozen=True, slots=True)
class Operand:
    """One slot of a kernel.

    kind: `int`, `float`, `weight` (`weight?` may be null), `in` (`in?` may be null), `out`,
    `inout`, or `part`: written together with other entries, each its own rows, so that they need
    no order.
    """

    name: str
    kind: str


def read_slots(text: str) -> tuple[Operand, ...]:
    """Return the slots of a kernel, each written as name:kind."""
    return tuple(Operand(*slot.split(":")) for slot in text.split())


_GEMM = "M:int N:int K:int A:in lda:int B:weight panel_stride:int bias:weight? "
_LINEAR = _GEMM + "R:in? ldr:int C:out ldc:int partial:out partial_size:int"
_ADAPTERS = "T:int R:int H:int adapters:in ranks:weight x:in ldx:int "
_HEADS = "n_q:int n_kv:int hd:int "
_SEEN = "scale:float window:int sinks:weight? "
_KEYS = "seq_starts:in seq_lengths:in block_tables:in table_stride:int kpool:in vpool:in "
_STATES = "seq_starts:in positions:in slots:in state:inout stride:int "
_CONV = "n_prefill:int n_decode:int C:int taps:int x:inout ldx:int w:weight bias:weight? "
_TURNS = "positions:in cos:weight sin:weight q_norm:weight? k_norm:weight? eps:float"
_SLOTS = {
    **dict.fromkeys(
        ("embed", "embed_layers"), "T:int H:int ids:in table:weight out:out ldo:int"
    ),
    "rmsnorm": "T:int H:int x:in ldx:int w:weight eps:float out:out ldo:int",
    "rmsnorm_add": "T:int H:int x:in ldx:int w:weight eps:float scale:weight? out:inout ldo:int",
    "rmsnorm_parts": "T:int n:int H:int x:in ldx:int w:weight eps:float out:inout ldo:int",
    "norm_rows": "T:int H:int x:inout ldx:int w:weight eps:float",
    "gate_rows": "T:int H:int x:inout ldx:int scale:float y:in ldy:int",
    "xielu_rows": "T:int H:int x:inout ldx:int w:weight",
    "row_gate": "T:int H:int gates:in ldg:int x:inout ldx:int",
    "cap_rows": "R:int V:int cap:float x:inout ldx:int",
    "scaled_add": "T:int H:int x:in ldx:int scale:float out:inout ldo:int",
    "route": "T:int E:int k:int groups:int used:int choice:weight? sigmoid:int share:int "
    "scale:float factors:weight? logits:in ldl:int chosen:out weights:out",
    "sort_experts": "T:int E:int k:int chosen:in starts:out places:out tokens:out",
    "expert_rows": "T:int k:int H:int tokens:in x:in ldx:int out:out ldo:int",
    "combine_experts": "T:int k:int H:int places:in weights:in x:in ldx:int R:in? ldr:int "
    "scale:float out:out ldo:int",
    "rope_store": "T:int qkv:inout ldq:int " + _HEADS + "rot:int span:int " + _TURNS
    + " v_norm:int kv_slots:in kpool:out vpool:out",
    "latent_store": "T:int q:in ldq:int plain:int rows:inout ldr:int n_q:int rank:int rot:int "
    "positions:in cos:weight sin:weight norm:weight eps:float kv_slots:in kpool:out",
    "prefill_attention": "n_prefill:int " + _HEADS + _SEEN + "q:in ldq:int " + _KEYS
    + "out:part ldo:int",
    "decode_attention": "n_prefill:int n_decode:int " + _HEADS + _SEEN + "kv_splits:int q:in "
    "ldq:int " + _KEYS + "partial:out out:part ldo:int",
    **dict.fromkeys(("conv_rows", "gated_conv_rows"), _CONV + _STATES + "out:out ldo:int"),
    "delta_rows": "n_prefill:int n_decode:int hk:int hv:int dk:int dv:int tiled:int x:in ldx:int "
    "rates:in ldr:int a_log:weight dt_bias:weight " + _STATES + "out:out ldo:int",
    "scan_rows": "n_prefill:int n_decode:int hk:int hv:int dk:int dv:int x:in ldx:int rates:in "
    "ldr:int a_log:weight dt_bias:weight skip:weight " + _STATES + "out:out ldo:int",
    "gated_norm": "T:int parts:int n:int w:weight? own:int eps:float first:int gate:in ldg:int "
    "x:inout ldx:int",
    "sigmoid_rows": "T:int H:int gate:in ldg:int x:inout ldx:int",
    **dict.fromkeys(("layer_inputs", "input_gate", "input_out"), _LINEAR),
    **dict.fromkeys(("qkv", "o", "mix_o", "router", "up", "down"), _LINEAR),
    **dict.fromkeys(("dense_up", "dense_down"), _LINEAR),
    **dict.fromkeys(("head", "pooler", "classifier", "dense"), _LINEAR),
    "heads": _GEMM + "R:in? ldr:int C:part ldc:int partial:part partial_size:int",
    **dict.fromkeys(("gate_up", "dense_gate_up"), _GEMM + "C:out ldc:int"),
    "gate_up_apart": _LINEAR,
    **dict.fromkeys(("gate_pairs", "own_gate"), "T:int H:int x:in ldx:int out:out ldo:int"),
    "adapter_in": _ADAPTERS + "first:weight out:out ldo:int",
    "adapter_out": _ADAPTERS + "second:weight out:part ldo:int step:int",
    "embed_sum": "T:int H:int ids:in table:weight positions:in places:weight? types:in "
    "kinds:weight? w:weight b:weight? eps:float out:out ldo:int",
    "layernorm": "T:int H:int x:in ldx:int w:weight b:weight? eps:float out:out ldo:int",
    "packed_attention": "n_sequences:int " + _HEADS + "scale:float reach:int causal:int "
    "bias:weight? span:int qkv:in ldq:int seq_starts:in out:out ldo:int",
    "rope_rows": "T:int qkv:inout ldq:int " + _HEADS + _TURNS,
    "mean_rows": "S:int H:int seq_starts:in x:in ldx:int out:out ldo:int",
    "unit_rows": "R:int H:int x:in ldx:int out:out ldo:int",
    "activate_rows": "T:int H:int x:in ldx:int out:out ldo:int",
    "order_columns": "T:int H:int order:weight x:in ldx:int out:out ldo:int",
    "gather_rows": "R:int H:int rows:in x:in ldx:int out:out ldo:int",
    "sample": "R:int V:int logits:in ldl:int temperature:in top_k:in top_p:in min_p:in uniform:in "
    "out_ids:out out_logprobs:out scratch:out",
}  # fmt: skip

OPERATORS = {op: read_slots(text) for op, text in _SLOTS.items()}
"""Every op a tape may hold, with its slots in order."""


def named_slots(entry: Entry) -> dict[str, Slot]:
    """Return the slots of an entry by the names of its operator's."""
    return {o.name: slot for o, slot in zip(OPERATORS[entry.op], entry.slots, strict=True)}
