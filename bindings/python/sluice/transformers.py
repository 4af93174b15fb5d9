"""The KV cache of a transformers model in Sluice's tiers, attended by a policy.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sluice")
    cache = SluiceCache(model.config, context=32768, policies=["values"], device_memory=64 << 20)
    model.generate(**inputs, past_key_values=cache, prefill_chunk_size=cache.chunk)

Importing this module registers the attention "sluice". Layers that attend to everything keep their
rows in Sluice's KvCache; layers with a sliding window, linear ones and every model without a
SluiceCache run as under "sdpa". A cache holds one sequence: batches, beams, padding and gradients
are refused.
"""

import contextlib

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)

from . import KvCache, PromptError, UsageError, parse_policy, value_basis

__all__ = ["SluiceCache"]

DEFAULT_STREAM = 1  # cudaStreamLegacy; torch writes 0 for it
ROWS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class SluiceLayer(DynamicLayer):
    """A layer of the model whose keys and values go to layer `index` of a SluiceCache."""

    def __init__(self, cache, index):
        super().__init__()
        self.cache = cache
        self.index = index
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states=None):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        self.cache.append(self, key_states, value_states)
        self.length += key_states.shape[-2]
        # The attention function gets these tensors, and by them finds the layer.
        keys = key_states.view_as(key_states)
        keys.sluice_layer = self
        return keys, value_states

    def get_seq_length(self, *args):
        return self.length

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.10

    def get_mask_sizes(self, query_length):
        # Before transformers 5.3 the argument was the positions.
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + count, 0

    def crop(self, tokens):
        length = self.length + tokens if tokens <= 0 else min(tokens, self.length)
        self.cache.truncate(max(length, 0))
        self.length = max(length, 0)

    def reset(self):
        self.cache.truncate(0)
        self.length = 0

    def offload(self):
        pass

    def prefetch(self):
        pass

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        if repeats != 1:
            raise UsageError("SluiceCache holds one sequence; beams and several answers need more")

    def batch_select_indices(self, indices):
        if [int(index) for index in indices] != [0]:
            raise UsageError("SluiceCache holds one sequence; beams and several answers need more")


class SluiceCache(DynamicCache):
    """A model's cache for one sequence of up to `context` tokens.

    `policies`, `device`, `threads`, `device_memory`, `host_memory` and `row_cache` are those of
    sluice.KvCache. `rows` is the type of the rows; None: the model's. `chunk` is the most tokens of
    one forward: give it to generate() as prefill_chunk_size, or make it as long as the prompts.
    `model`, whose config it is, is what policies with components=half, such as compact, need.
    """

    def __init__(self, config, *, context, policies=(), chunk=512, rows=None, model=None, **options):
        text = config.get_text_config(decoder=True)
        super().__init__(config=text)
        settings = [parse_policy(policy) for policy in policies]
        if any("correct=" in policy for policy in settings):
            raise UsageError("SluiceCache: transformers cannot recompute tokens, so no `correct`")
        self._projections = None  # of the values of its layers, for policies that need a basis
        halves = any("components=half" in policy for policy in settings)
        if halves and model is None:
            raise UsageError("SluiceCache: components=half needs the weights; give it `model`")
        self.chunk = chunk
        self.kv = None  # made when the first keys tell its shape
        self.sequence = None
        self._stream = None  # the CUDA stream in whose order `kv` computes
        self._step = None
        self._appended = set()
        self._attended = set()
        self._settings = {"context": context, "policies": list(policies), "rows": rows, **options}
        self._group = text.num_attention_heads // (
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        )
        self._layers = []
        for number, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[number] = SluiceLayer(self, len(self._layers))
                self._layers.append(self.layers[number])
        if not self._layers:
            raise UsageError("SluiceCache: no layer of this model attends to everything")
        if halves:
            self._projections = [
                value_projection(model, number)
                for number, layer in enumerate(self.layers)
                if isinstance(layer, SluiceLayer)
            ]

    def ledger(self):
        """The rows and bytes that moved or were read; None before the first forward."""
        return self.sequence.ledger() if self.sequence is not None else None

    def append(self, layer, keys, values):
        """Begins a step with a forward's first layer, and appends the layer's rows."""
        if keys.shape[0] != 1:
            raise UsageError(f"SluiceCache holds one sequence, and this is a batch of {keys.shape[0]}")
        if torch.is_grad_enabled() and keys.requires_grad:
            raise UsageError("SluiceCache keeps no gradients; use torch.no_grad()")
        if values.shape != keys.shape:
            raise UsageError("SluiceCache: keys and values of different sizes")
        if self.kv is None:
            self._open(keys)
        if self._step is not None and layer.index in self._appended:
            # A forward that failed left it; its sequence fails with it, and says so.
            self._step = None
        if self._step is None:
            self._begin(keys.shape[2])
        keys, values = rows_of(keys), rows_of(values)
        with self._in_order(keys):
            self._step.append(layer.index, keys, values)
        self._appended.add(layer.index)

    def attend(self, layer, query, scaling):
        """Attends [1, heads, tokens, head_dim]; ends the step with its last layer."""
        usual = query.shape[-1] ** -0.5
        if scaling is not None and scaling != usual:
            query = query * (scaling / usual)
        tokens, heads, head_dim = query.shape[2], query.shape[1], query.shape[3]
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
        rows = rows_of(query)
        with self._in_order(rows):
            self._step.attend(layer.index, rows, out)
        self._attended.add(layer.index)
        if len(self._attended) == len(self._layers):
            step, self._step = self._step, None
            step.end()
        return out.unsqueeze(0)

    def truncate(self, length):
        """Forgets the tokens from `length` on; the layers do it one after the other."""
        self._step = None
        if self.sequence is None:
            return
        if length == 0:
            self.sequence.reset()
        elif len(self.sequence) > length:
            self.sequence.truncate(length)

    def _open(self, keys):
        if keys.dtype not in ROWS:
            raise UsageError(f"SluiceCache: {keys.dtype} is not float32, float16 or bfloat16")
        settings = dict(self._settings)
        settings["rows"] = settings["rows"] or ROWS[keys.dtype]
        settings.setdefault("device", str(keys.device))
        if keys.is_cuda and settings["device"].startswith("cuda"):
            self._stream = torch.cuda.current_stream(keys.device)
            settings["stream"] = self._stream.cuda_stream or DEFAULT_STREAM
        if self._projections is not None:
            settings["value_basis"] = basis_of(self._projections, keys.shape[1], keys.shape[3])
        self.kv = KvCache(
            layers=len(self._layers),
            query_heads=keys.shape[1] * self._group,
            kv_heads=keys.shape[1],
            head_dim=keys.shape[3],
            chunk=self.chunk,
            **settings,
        )
        self.sequence = self.kv.new_sequence()

    def _begin(self, tokens):
        plan = self.kv.plan
        left = plan["context"] - len(self.sequence)
        if tokens > left:
            raise PromptError(
                f"{tokens} more tokens do not fit: {left} of the planned context of "
                f"{plan['context']} are free; raise `context`"
            )
        most = plan["chunk"]
        if tokens > most:
            raise UsageError(
                f"SluiceCache takes {most} tokens in a forward, and this has {tokens}: give "
                f"generate() prefill_chunk_size={most}, or the cache a larger `chunk`"
            )
        phase = "decode" if tokens == 1 and len(self.sequence) > 0 else "prefill"
        self._appended.clear()
        self._attended.clear()
        self._step = self.sequence.begin_step(phase, tokens)

    @contextlib.contextmanager
    def _in_order(self, tensor):
        """Orders what the cache computes before and after the work of torch's current stream."""
        current = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        if self._stream is None or current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        yield
        current.wait_stream(self._stream)


def value_projection(model, number):
    """The weights of a layer's value projection, [kv_heads * head_dim, hidden]."""
    layers = model.get_decoder().layers
    attention = getattr(layers[number], "self_attn", None)
    weight = getattr(getattr(attention, "v_proj", None), "weight", None)
    if weight is None or weight.dtype not in ROWS or weight.dim() != 2:
        raise UsageError(
            "SluiceCache: components=half needs self_attn.v_proj of every layer, with weights in "
            "float32, float16 or bfloat16"
        )
    return weight


def basis_of(projections, kv_heads, head_dim):
    """KvCache's value_basis, [layers, kv_heads, head_dim / 2, head_dim]."""
    basis = torch.empty((len(projections), kv_heads, head_dim // 2, head_dim))
    for of_layer, projection in zip(basis, projections, strict=True):
        weights = projection.detach().to("cpu").reshape(kv_heads, head_dim, -1)
        for of_head, rows in zip(of_layer, weights, strict=True):
            value_basis(rows.contiguous(), of_head)
    return basis


def rows_of(tensor):
    """[1, heads, tokens, head_dim] as [tokens, heads, head_dim], without a copy if it can be."""
    rows = tensor.detach()[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def sluice_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The attention of a layer: in its SluiceCache, or as under "sdpa" if it has none."""
    layer = getattr(key, "sluice_layer", None)
    if layer is None:
        tokens, all_tokens = query.shape[2], key.shape[2]
        if attention_mask is None and 1 < tokens < all_tokens:
            # A mask that sluice_mask left out, and that is_causal would align to the first token.
            shape = (tokens, all_tokens)
            attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device)
            attention_mask = attention_mask.tril(all_tokens - tokens)[None, None]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if kwargs.get(name) is not None:
            raise UsageError(f"SluiceCache: attention with `{name}` is not supported")
    if kwargs.get("dropout"):
        raise UsageError("SluiceCache: no dropout; call model.eval()")
    if attention_mask is not None:
        raise UsageError("SluiceCache: no padding or masks of other kinds; give one whole prompt")
    return layer.cache.attend(layer, query, scaling), None


def sluice_mask(*args, mask_function=causal_mask_function, attention_mask=None, **kwargs):
    """No mask where attention is causal and nothing is padding; else that of "sdpa"."""
    positions = kwargs.get("cache_position")
    if positions is not None:
        seen = int(positions[-1]) + 1
    else:
        seen = int(kwargs.get("q_offset", 0)) + kwargs.get("q_length", -1)
    is_whole = kwargs.get("kv_length") == seen and kwargs.get("kv_offset", 0) == 0
    if not args and is_whole and mask_function is causal_mask_function:
        if attention_mask is None or bool(attention_mask.all()):
            return None
    return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)


transformers.AttentionInterface.register("sluice", sluice_attention)
AttentionMaskInterface.register("sluice", sluice_mask)
